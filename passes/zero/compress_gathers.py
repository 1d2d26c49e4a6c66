"""CompressGathers: parameters that are cast down after their gather are cast before it, and fewer bytes are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import bound_arguments, emit, fake_value, find_calls, is_returned, replace_and_erase

aten = torch.ops.aten


@dataclass(frozen=True)
class CompressGathers(GraphPass):
    """Gather a parameter in a lower precision if it is only used in that.

    before:  w = gather_param(shard, None, [4, 4], dtype=float32, ...); low = convert_element_type(w, bfloat16)
    after:   low = gather_param(shard, None, [4, 4], dtype=bfloat16, ...)

    This is the case under autocast for weights of matrix products: half the bytes are sent, half the memory is used,
    and the numbers are the same bit for bit, because a cast works element by element. Gradients are sent as before.
    Left alone: a parameter that is used in its own precision as well, or in two lower ones; one of which the graph
    returns two casts, which are two tensors; gathered copies, which are gathered outside the graph; replicated
    parameters.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    graph: ClassVar[str] = "step"
    changes_collectives: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"compressed-gathers"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})  # it rewrites the markers

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        changed = 0
        for gather in find_calls(gm, torch.ops.dsgraph.gather_param.default):
            call, casts = bound_arguments(gather), list(gather.users)
            dtype = _lower_dtype(casts, call["dtype"])
            if (
                dtype is None
                or call["gathered_copy"] is not None
                or not call["group"]
                or sum(map(is_returned, casts)) > 1
            ):
                continue
            how = {name: call[name] for name in ("reduce_dtype", "group", "outer_groups")}
            low = emit(
                gather, torch.ops.dsgraph.gather_param.default, call["shard"], None, call["shape"], dtype=dtype, **how
            )
            for cast in casts:
                replace_and_erase(cast, low)
            gather.graph.erase_node(gather)
            changed += 1
        return PassResult(changed=changed)


def _lower_dtype(users: Sequence[Node], dtype: torch.dtype) -> torch.dtype | None:
    """Return the only dtype to which all users of a parameter cast it, if that is a lower precision."""
    dtypes = {fake_value(user).dtype if _is_cast(user) else None for user in users}
    low: torch.dtype | None = dtypes.pop() if len(dtypes) == 1 else None
    is_lower = low is not None and low.is_floating_point and low.itemsize < dtype.itemsize
    return low if is_lower else None


def _is_cast(node: Node) -> bool:
    is_copy = node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}
    return is_copy or node.target is torch.ops.prims.convert_element_type.default

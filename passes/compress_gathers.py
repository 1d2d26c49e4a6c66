"""CompressGathers: what the model casts down after it was gathered is cast down first, and fewer bytes travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from .base import GraphPass, PassContext, PassResult, Phase
from .graph import bound_arguments, emit, fake_value, find_calls, replace_and_erase

aten = torch.ops.aten


@dataclass(frozen=True)
class CompressGathers(GraphPass):
    """Gather a parameter in the lower precision in which alone it is used.

    before:  w = gather_param(shard, None, [4, 4], dtype=float32, ...); low = convert_element_type(w, bfloat16)
    after:   low = gather_param(shard, None, [4, 4], dtype=bfloat16, ...)

    As autocast casts the weights of matrix products: half the bytes on the wire, half the memory, and the same numbers
    bit for bit, because a cast takes no notice of its neighbours. Gradients travel as before. Left alone: a parameter
    that is used in its own precision as well, or in two lower ones; replicas, which are gathered outside the graph;
    parameters that every rank holds whole.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    needs_mesh: ClassVar[bool] = True
    changes_collectives: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"compressed-gathers"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})  # it rewrites the markers

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        changed = 0
        for gather in find_calls(gm, torch.ops.dsgraph.gather_param.default):
            call = bound_arguments(gather)
            dtypes = {_lower_dtype(user, gather) for user in gather.users}
            if call["replica"] is not None or not call["group"] or len(dtypes) != 1 or None in dtypes:
                continue
            (dtype,) = dtypes
            how = {name: call[name] for name in ("reduce_dtype", "group", "outer_groups")}
            low = emit(
                gather, torch.ops.dsgraph.gather_param.default, call["shard"], None, call["shape"], dtype=dtype, **how
            )
            for cast in list(gather.users):
                replace_and_erase(cast, low)
            gather.graph.erase_node(gather)
            changed += 1
        return PassResult(changed=changed)


def _lower_dtype(node: Node, gathered: Node) -> torch.dtype | None:
    """The dtype to which a node casts `gathered` down; None for any other node."""
    if node.target is torch.ops.prims.convert_element_type.default:
        dtype = node.args[1]
    elif node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}:
        dtype = node.kwargs["dtype"]
    else:
        return None
    is_lower = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < _dtype(gathered).itemsize
    return dtype if isinstance(dtype, torch.dtype) and is_lower else None


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = fake_value(node).dtype
    return dtype

"""LowerForwardSlices, LowerBackwardSlices: sums and gathers of slices become collectives that code generators know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from dsgraph.inductor_ext.collectives.tensor_slices import lowered_gather, lowered_scatter, lowered_sum
from dsgraph.passes.core.capture_facts import CaptureFacts
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import bound_arguments, replace_and_erase
from dsgraph.passes.ir.recording import Recording

_own = torch.ops.dsgraph
_LOWERED: Mapping[object, Callable[..., Tensor]] = MappingProxyType(
    {
        _own.sum_slices.default: lowered_sum,
        _own.gather_slices.default: lowered_gather,
        _own.gather_entered.default: lowered_gather,
        _own.scatter_sum.default: lowered_scatter,
        _own.enter_slices.default: lambda x, group: x.clone(),
    }
)


@dataclass(frozen=True)
class LowerForwardSlices(GraphPass):
    """Write the communication of tensor-parallel slices as functional collectives, in the forward.

    before:  y = sum_slices(x, "tp"); w = gather_slices(own, 0, 1, 2, "tp"); e = enter_slices(x, "tp")
    after:   y = wait_tensor(all_reduce(x, "sum", "tp"))
             w = clone(view(wait_tensor(all_gather_into_tensor(own, 2, "tp")), ...)); e = clone(x)

    Inductor would call the ops before as unknown ones, which it does not order with other collectives. Left alone:
    `own_slice`, which communicates nothing.
    """

    phase: ClassVar[Phase] = Phase.FORWARD
    changes_collectives: ClassVar[bool] = True

    def applies(self, facts: CaptureFacts) -> bool:
        return facts.is_sliced and not facts.is_step

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        calls = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in _LOWERED]
        for node in calls:
            given, recording = dict(bound_arguments(node)), Recording(node)
            operand = given.pop(next(iter(given)))
            lowered = _LOWERED[node.target]
            replace_and_erase(node, recording.node(recording.run(_bound(lowered, given), operand)))
        return PassResult(changed=len(calls))


@dataclass(frozen=True)
class LowerBackwardSlices(LowerForwardSlices):
    """Do the same in the backward: see `LowerForwardSlices`.

    before:  dx = sum_slices(de, "tp")
    after:   dx = wait_tensor(all_reduce(de, "sum", "tp"))
    """

    phase: ClassVar[Phase] = Phase.BACKWARD


def _bound(function: Callable[..., Tensor], given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x, **given)

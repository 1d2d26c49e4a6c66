"""OffloadGradients: gradients of parameters on disk are written there as soon as they are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.core.capture_facts import CaptureFacts
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import emit, placeholders

ops = torch.ops.dsgraph


@dataclass(frozen=True)
class OffloadGradients(GraphPass):
    """Write each gradient of a parameter on disk to its place there, instead of returning it.

    before:  g = wait_tensor(reduce_scatter_tensor(dw, ...));                              return ..., g
    after:   g = wait_tensor(reduce_scatter_tensor(dw, ...)); n = store_gradient(g, rows); return ..., n

    One expanded zero is returned in its place. So only a few gradients are in memory at once. Left alone: gradients of
    parameters in memory.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    graph: ClassVar[str] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})

    def applies(self, facts: CaptureFacts) -> bool:
        """Return True if parameters of the graph are stored on disk."""
        return any(info.tier for info in facts.params.values())

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        places = {
            info.name: node
            for node in placeholders(gm)
            if (info := ctx.params.get(node.name)) is not None and info.tier == "disk"
        }
        output = gm.graph.output_node()
        (values,) = output.args
        assert isinstance(values, (tuple, list))
        returned = list(values)
        changed = 0
        for number, name in ctx.gradients.items():
            grad, rows = returned[number], places.get(name)
            if rows is not None and isinstance(grad, Node):
                returned[number] = emit(grad.next, ops.store_gradient.default, grad, rows)
                changed += 1
        output.args = (tuple(returned),)
        return PassResult(changed=changed, done=(f"{changed} gradients to disk",) if changed else ())

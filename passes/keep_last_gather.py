"""KeepLastGather: what the forward gathers last, the backward reads first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.inductor_ext import c10d_functional

from .base import GraphPass, PassContext, PassResult, Phase
from .compat import is_tangent
from .graph import collectives, placeholders, wait_of

_GATHERS = (c10d_functional.all_gather_into_tensor.default, torch.ops.dsgraph.gather_by_broadcasts.default)


@dataclass(frozen=True)
class KeepLastGather(GraphPass):
    """In a graph that ends in a loss, keep the parameter that is gathered last for the backward.

    before:  last = wait_tensor(all_gather_into_tensor(shard)); loss = f(x, last)      # gathered again
    after:   last = wait_tensor(all_gather_into_tensor(shard)); loss = f(x, last)      # last: MUST_SAVE

    The backward of a loss begins where the forward ends, mostly with the output layer's weight: gathering it again
    would be waited for with nothing to compute meanwhile. Left alone: graphs without an output of one element to
    differentiate, such as one block of a model that is compiled block by block, whose backward may be far away.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    needs_mesh: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        tangents = [node for node in placeholders(gm) if is_tangent(node)]
        if not any(node.meta["val"].dim() == 0 for node in tangents):
            return PassResult(changed=0)
        gathers = [started for started in collectives(gm) if started.target in _GATHERS and _is_recomputed(started)]
        if not gathers:
            return PassResult(changed=0)
        wait_of(gathers[-1]).meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return PassResult(changed=1)


def _is_recomputed(started: Node) -> bool:
    return started.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE

"""LowerFakeWeights: a fake-quantized weight is rounded again for the backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule

from dsgraph.inductor_ext.quant.fake_quantize import reference
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import bound_arguments, find_calls, replace_and_erase
from dsgraph.passes.ir.recording import Recording
from dsgraph.passes.ir.save_plan import recompute_with_users


@dataclass(frozen=True)
class LowerFakeWeights(GraphPass):
    """Write `fake_quantize` as small ops, and recompute them for the backward.

    before:  w = wait_tensor(all_gather_into_tensor(shard)); q = fake_quantize(w, control, ...); y = mm(x, t(q))
    after:   w = ...; levels, share, _ = unbind(control); scale = div(amax(abs(w), [1]), levels)
             made = mul(minimum(maximum(round(div(w, scale)), neg(levels)), levels), scale)
             q = add(mul(share, w), mul(add(neg(share), 1), made)); y = mm(x, t(q))

    Code generators fuse the small ops. All of them, and views of the result, are tagged for recomputation: the saved
    values are the same as without it, and at stage 3 no full parameter is saved. Left alone: nothing.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    graph: ClassVar[str] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        calls = find_calls(gm, torch.ops.dsgraph.fake_quantize.default)
        made = []
        for node in calls:
            given, recording = bound_arguments(node), Recording(node)
            weight, control = given.pop("weight"), given.pop("control")

            def run(w: torch.Tensor, c: torch.Tensor, how: dict[str, bool] = given) -> torch.Tensor:
                return reference(w, c, **how)

            result = recording.node(recording.run(run, weight, control))
            made += recording.made
            replace_and_erase(node, result)
        recompute_with_users(made)
        return PassResult(changed=len(calls))

"""A planned split is torch's, node by node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from dsgraph.passes.compat import min_cut_rematerialization_partition
from dsgraph.passes.ir.graph import find_calls
from dsgraph.passes.ir.save_plan import Choice, SavePlan
from dsgraph.passes.memory.forward_values import of_gradients
from dsgraph.passes.memory.replay import backward_steps
from dsgraph.passes.memory.scratch import copy_graph
from dsgraph.passes.memory.split_as_planned import split_as_planned
from tests.passes.tracing import joint

aten = torch.ops.aten
SAVED = ("mm", "mm_1")
MATRICES = torch.randn(2, 4, 4).unbind()


def _loss(x: Tensor, w: Tensor) -> Tensor:
    hidden = torch.mm(x, w).sin()
    largest, _ = (torch.mm(hidden, w).exp() * hidden).max(dim=1)
    return largest.square().sum()


def _repeated(gm: GraphModule) -> list[str]:
    """Names of the values that the backward lacks if only `SAVED` are saved."""
    kept = {node for node in gm.graph.nodes if node.name in SAVED}
    return [node.name for node, is_again in backward_steps(gm, of_gradients(gm), kept) if is_again]


def _described(gm: GraphModule) -> list[object]:
    (output,) = gm.graph.find_nodes(op="output")
    nodes = [(node.op, node.name, str(node.args), node.meta.get("autograd_backward")) for node in gm.graph.nodes]
    return [*nodes, *map(str, output.meta["desc"])]


def test_it_is_the_split_of_torch():
    gm = joint(_loss, *MATRICES)
    repeated = _repeated(gm)
    ours = split_as_planned(gm, saved=SAVED, repeated=repeated, outputs=1)
    assert ours is not None and not any("recompute" in node.meta for node in gm.graph.nodes)
    assert {"sin", "exp", "max_1"} <= set(repeated)
    part = copy_graph(gm)
    SavePlan({**dict.fromkeys(repeated, Choice.RECOMPUTE), **dict.fromkeys(SAVED, Choice.SAVE)}).write(part)
    theirs = min_cut_rematerialization_partition(part, [], num_fwd_outputs=1)
    assert [_described(part) for part in ours] == [_described(part) for part in theirs]


def test_a_plan_that_leaves_a_choice_is_left_to_torch():
    gm = joint(_loss, *MATRICES)
    repeated = [name for name in _repeated(gm) if name != "exp"]
    assert split_as_planned(gm, saved=SAVED, repeated=repeated, outputs=1) is None


def _drops(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.dropout(torch.mm(x, w).sin(), 0.5).square().sum()


@pytest.mark.parametrize("is_saved", [True, False])
def test_random_numbers_are_drawn_again_by_torch_only(is_saved):
    gm = joint(_drops, *MATRICES)
    drawn = [
        node.name
        for op in (aten.rand.default, aten.native_dropout.default, aten.bernoulli.p)
        for node in find_calls(gm, op)
    ]
    values = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    kept = {"mm", *(values if is_saved else ())}
    pair = split_as_planned(gm, saved=kept, repeated=set(values) - kept, outputs=1)
    assert drawn and (pair is not None) == is_saved

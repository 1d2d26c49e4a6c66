from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

import dsgraph
from dsgraph.passes import PassContext, Phase, Pipeline, Runner
from dsgraph.passes.compat import is_to_local
from dsgraph.passes.ir.graph import all_graph_modules, is_gather_marker
from dsgraph.passes.zero.merge_gathers import MergeGathers

pytestmark = pytest.mark.usefixtures("one_rank")


class Pair(nn.Module):
    """Two layers tied to one weight."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def _capture(forward):
    """The captured graph of a partitioned `Pair`, before any pass."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    model = dsgraph.partition(Pair(forward), stage=3, keep_whole_below=0)
    torch.compile(model, backend=keep, fullgraph=True)(torch.randn(2, 4))
    (gm,) = graphs
    return gm


def _merge(gm):
    runner = Runner(Pipeline([MergeGathers()]))
    runner.run(gm, PassContext(phase=Phase.CAPTURE))
    return runner.records[0].changed


def _notes(gm):
    return MergeGathers().run(gm, PassContext(phase=Phase.CAPTURE)).notes


def _markers(gm):
    return sum(is_gather_marker(node) for module in all_graph_modules(gm) for node in module.graph.nodes)


def test_two_uses_share_one_marker():
    gm = _capture(lambda self, x: self.b(torch.tanh(self.a(x))))
    assert _markers(gm) == 2
    assert _merge(gm) == 1
    assert sum(is_to_local(node) for node in gm.graph.nodes) == 1
    FileCheck().check("dsgraph.gather_param(").check("linear(l_x_, gather_param").check(
        "linear(tanh, gather_param"
    ).run(gm.code)


def test_gradients_add_up_before_the_one_reduction():
    """Bit for bit the gradient of the model that is not partitioned."""
    x = torch.randn(2, 4)
    alone = Pair(lambda self, x: self.b(torch.tanh(self.a(x))))
    model = dsgraph.partition(Pair(lambda self, x: self.b(torch.tanh(self.a(x)))), stage=3, keep_whole_below=0)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            mine.to_local().copy_(theirs)
    torch.compile(model, backend="dsgraph", options={"codegen": "eager"})(x).sum().backward()
    alone(x).sum().backward()
    assert torch.equal(model.a._parameters["weight"].grad.to_local(), alone.a.weight.grad)


def test_grad_modes_are_kept_apart():
    """The use under no_grad must not receive a gradient, the other one must."""

    def forward(self, x):
        with torch.no_grad():
            y = self.a(x)
        return self.b(x + y)

    gm = _capture(forward)
    assert _merge(gm) == 0
    assert _markers(gm) == 2
    (note,) = _notes(gm)
    assert note.endswith("is gathered 2 times: its uses differ in grad mode")


def test_uses_within_one_grad_mode_merge_around_another():
    def forward(self, x):
        y = self.a(x)
        with torch.no_grad():
            z = self.a(x) + self.b(x)
        return self.b(y) + z

    gm = _capture(forward)
    assert _merge(gm) == 2
    assert _markers(gm) == 2


def test_checkpoint_regions_reduce_for_themselves():
    def forward(self, x):
        x = checkpoint(lambda h: self.b(torch.tanh(self.a(h))), x, use_reentrant=False)
        return self.a(x)

    gm = _capture(forward)
    assert _markers(gm) == 3
    assert _merge(gm) == 1
    assert _markers(gm) == 2
    assert _notes(gm) == ("checkpoint regions reduce their gradients separately: 1 in 1 regions",)


def test_a_parameter_that_the_graph_writes_to_is_left_alone():
    def forward(self, x):
        y = self.a(x)
        with torch.no_grad():
            self.a._parameters["weight"].mul_(0.5)
        return y + self.b(x)

    gm = _capture(forward)
    before = gm.code
    assert _merge(gm) == 0
    assert gm.code == before
    (note,) = _notes(gm)
    assert note.endswith("is gathered 2 times: the graph may write to it")


def test_different_parameters_are_left_alone():
    def forward(self, x):
        return F.relu(self.a(x))

    gm = _capture(forward)
    before = gm.code
    assert _merge(gm) == 0
    assert gm.code == before


def test_a_second_run_changes_nothing():
    gm = _capture(lambda self, x: self.b(torch.tanh(self.a(x))))
    _merge(gm)
    before = gm.code
    assert _merge(gm) == 0
    assert gm.code == before

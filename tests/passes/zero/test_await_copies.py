"""AwaitCopies: where the waits go, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule
from torch.testing import FileCheck

from dsgraph.inductor_ext import c10d_functional
from dsgraph.passes import CostModel, PassError, PassResult, graph_pass
from dsgraph.passes.analysis.memory import simulate
from dsgraph.passes.analysis.predicted_times import predict
from dsgraph.passes.ir.collectives import collectives
from dsgraph.passes.ir.graph import aliased_arguments, find_calls, is_arrival, replace_and_erase
from dsgraph.passes.zero.await_copies import AwaitCopies
from tests.passes.tracing import code, run_pass, trace


def two_layers(x, first, second):
    return torch.mm(torch.relu(torch.mm(x, first.t())), second), first, second


def inputs():
    return torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 8)


def run(gm: GraphModule, *gathered_copies: str) -> PassResult:
    return run_pass(AwaitCopies(), gm, gathered_copies=frozenset(gathered_copies))


def test_each_copy_is_waited_for_ahead_of_its_first_use():
    gm = trace(two_layers, *inputs())
    assert run(gm, "first_1", "second_1").changed == 2
    FileCheck().check("def forward(self, x_1, first_1, second_1)").check_next(
        "wait_tensor_default = torch.ops._c10d_functional.wait_tensor.default(first_1)"
    ).check_next("t = torch.ops.aten.t.default(wait_tensor_default)").check_next(
        "mm = torch.ops.aten.mm.default(x_1, t)"
    ).check_next("relu = torch.ops.aten.relu.default(mm)").check_next(
        "wait_tensor_default_1 = torch.ops._c10d_functional.wait_tensor.default(second_1)"
    ).check_next("mm_1 = torch.ops.aten.mm.default(relu, wait_tensor_default_1)").check_next(
        "return (mm_1, first_1, second_1)"
    ).run(code(gm))


def test_the_meaning_is_kept():
    given = inputs()
    gm = trace(two_layers, *given)
    expected = gm(*given)
    run(gm, "first_1", "second_1")
    found = gm(*given)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert found[1] is given[1], "what is saved is the input itself"


def test_what_is_only_handed_on_has_arrived_when_the_graph_is_through():
    gm = trace(lambda x, w: (x + 1, w), *inputs()[:2])
    assert run(gm, "w_1").changed == 1
    FileCheck().check("add = ").check_next("wait_tensor.default(w_1)").check_next("return (add, w_1)").run(code(gm))


def test_other_inputs_and_unused_copies_are_left_alone():
    gm = trace(lambda x, w, unused: torch.mm(x, w), *inputs())
    before = code(gm)
    assert run(gm, "unused_1").changed == 0
    assert code(gm) == before


def test_a_second_run_changes_nothing():
    gm = trace(two_layers, *inputs())
    run(gm, "first_1", "second_1")
    before = code(gm)
    assert run(gm, "first_1", "second_1").changed == 0
    assert code(gm) == before


def test_a_wait_for_an_input_is_no_collective_and_costs_nothing():
    """Code that reads graphs treats it as a view of the input."""
    gm = trace(two_layers, *inputs())
    nodes, peak = list(gm.graph.nodes), simulate(gm).peak
    before = predict(nodes, CostModel.default()).begins
    run(gm, "first_1", "second_1")
    waits = find_calls(gm, c10d_functional.wait_tensor.default)
    assert collectives(gm) == [] and all(map(is_arrival, waits))
    assert [aliased_arguments(wait)[0].name for wait in waits] == ["first_1", "second_1"]
    assert simulate(gm).peak == peak
    found = predict(list(gm.graph.nodes), CostModel.default()).begins
    assert [found[node] for node in nodes] == [before[node] for node in nodes]


@graph_pass(phase="forward")
def read_early(gm, ctx):
    (wait,) = find_calls(gm, c10d_functional.wait_tensor.default)
    wait.replace_all_uses_with(wait.all_input_nodes[0])
    return 1


@graph_pass(phase="forward")
def drop_wait(gm, ctx):
    (wait,) = find_calls(gm, c10d_functional.wait_tensor.default)
    replace_and_erase(wait, wait.all_input_nodes[0])
    return 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (read_early, r"pass read_early.*mm reads gathered copy w_1, .*it must read wait_tensor_default"),
        (drop_wait, r"pass drop_wait removed the wait_tensor for gathered copy 'w_1'"),
    ],
)
def test_the_verifier_finds_reads_that_do_not_wait(bad, message):
    gm = trace(lambda x, w: (torch.mm(x, w), w), *inputs()[:2])
    run(gm, "w_1")
    with pytest.raises(PassError, match=message):
        run_pass(bad, gm, gathered_copies=frozenset({"w_1"}))

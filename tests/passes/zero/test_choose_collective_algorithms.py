from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import FileCheck
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.inductor_ext.units import RUN_BACKWARD
from dsgraph.passes import CostModel, PassError, PassResult, Pipeline
from dsgraph.passes.analysis.hardware import DEVICES, Link, LinkTable
from dsgraph.passes.ir.collectives import collective_kind, collectives
from dsgraph.passes.ir.graph import fake_value, placeholders
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.passes import lockstep
from tests.passes.tracing import GLOO, SHARD, code, gather, reduce, run_pass, trace

c10d = torch.ops._c10d_functional


def _lowered(*inputs, rows=2, axis=GLOO):
    gm = trace(lambda a: (reduce(a * 2, (rows, 3)),), *inputs)
    run_pass(InsertZeroCollectives(), gm, axis)
    return gm


def test_gloo_exchanges_rows_and_adds_them_up():
    gm = _lowered(torch.randn(4, 3))
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 1
    FileCheck().check("exchange_by_messages.default(mul, 2, '0')").check_next("wait_tensor").check_next(
        "view.default("
    ).check_same("[2, 2, 3]").check_next("sum.dim_IntList(").check_same("[0]").check_next("div.Tensor").run(code(gm))
    FileCheck().check_not("reduce_scatter").run(code(gm))


def _gathering(shard):
    gm = trace(lambda a: (gather(a, (5, 3)) * 2,), shard)
    run_pass(InsertZeroCollectives(), gm, GLOO)
    return gm


def test_gloo_gathers_by_messages_that_are_still_repeated_in_the_backward():
    gm = _gathering(torch.randn(3, 3))
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 1
    FileCheck().check("gather_by_messages.default(a_1, 2, '0')").check_next("wait_tensor").check_next(
        "slice.Tensor"
    ).run(code(gm))
    FileCheck().check_not("all_gather").run(code(gm))
    (started,) = collectives(gm)
    assert started.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE


def test_gathered_rows_are_the_same():
    inputs = [[torch.randn(3, 3)], [torch.randn(2, 3)]]
    graphs = [_gathering(*given) for given in inputs]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        run_pass(ChooseCollectiveAlgorithms(), gm, GLOO)
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        assert torch.equal(before[0], after[0])


@pytest.mark.parametrize("rows", [(2, 2), (3, 2), (1, 0), (2, 2, 2)])
def test_meaning_is_kept_bit_for_bit(rows):
    torch.manual_seed(0)
    axis = replace(GLOO, size=len(rows))  # with three ranks the order of the sum shows
    inputs = [[torch.randn(sum(rows), 3)] for _ in rows]
    graphs = [_lowered(*given, rows=own, axis=axis) for given, own in zip(inputs, rows, strict=True)]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        run_pass(ChooseCollectiveAlgorithms(), gm, axis)
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        assert torch.equal(before[0], after[0])


FORMS = ("exchange_by_messages", "all_to_all_single", "reduce_scatter_tensor")


def _costs(axis=GLOO, **latencies):
    """Costs by which kinds of collectives take so many seconds, whatever they send."""
    table = LinkTable(Link(9.0, 1e30), tuple((kind, Link(seconds, 1e30)) for kind, seconds in latencies.items()))
    return CostModel(DEVICES["cpu"], (axis,), {axis.group: table})


def _favouring(form, axis=GLOO):
    steps = axis.size - 1  # of gloo's own, one after the other
    kinds = {kind: (0.001 if kind == form else 0.002) / (1 if kind == FORMS[0] else steps) for kind in FORMS}
    return _costs(axis, **kinds)


def test_the_fastest_form_of_a_reduction_is_taken_by_the_measured_figures():
    codes = {}
    for form in FORMS:
        gm = _lowered(torch.randn(4, 3))
        result = run_pass(ChooseCollectiveAlgorithms(), gm, GLOO, costs=_favouring(form))
        assert result.changed == (form != "reduce_scatter_tensor")
        codes[form] = code(gm)
        note = f"1 of 1 reductions use {form}, which is predicted to save 1"
        assert [found.startswith(note) for found in result.notes] == [True] * (form != FORMS[0])
    FileCheck().check("exchange_by_messages.default(mul, 2, '0')").check_next("wait_tensor").check_next(
        "[2, 2, 3]"
    ).check_next("sum.dim_IntList(").run(codes["exchange_by_messages"])
    FileCheck().check("all_to_all_single.default(mul, [2, 2], [2, 2], '0')").check_next("wait_tensor").check_next(
        "[2, 2, 3]"
    ).check_next("sum.dim_IntList(").run(codes["all_to_all_single"])
    assert codes["reduce_scatter_tensor"] == code(_lowered(torch.randn(4, 3)))


def test_the_accumulated_grad_counts():
    times = {"exchange_by_messages": 0.001, "reduce_scatter_tensor": 0.001}
    gm = _lowered(torch.randn(4, 3))
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO, costs=_costs(**times)).changed == 0


@pytest.mark.parametrize(
    "times",
    [
        {"exchange_by_messages": 0.001, "all_to_all_single": 0.001},  # equals
        {"all_to_all_single": 0.001, "reduce_scatter_tensor": 0.001},  # nobody has measured messages
        {},
    ],
)
def test_equals_and_missing_figures_are_messages(times):
    gm = _lowered(torch.randn(4, 3))
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO, costs=_costs(**times)).notes == ()
    FileCheck().check("exchange_by_messages").run(code(gm))


def test_costs_without_the_group_and_gradients_without_elements_are_messages():
    for gm, costs in (
        (_lowered(torch.randn(4, 3)), replace(_favouring("all_to_all_single"), links={})),
        (_lowered(torch.randn(0, 3), rows=0), _favouring("all_to_all_single")),
    ):
        run_pass(ChooseCollectiveAlgorithms(), gm, GLOO, costs=costs)
        FileCheck().check("exchange_by_messages").run(code(gm))


def test_small_and_large_reductions_may_differ_and_are_counted():
    def function(a, b, c):
        return tuple(reduce(grad * 2, (len(grad) // 2, 64)) for grad in (a, b, c))

    gm = trace(function, torch.randn(4, 64), torch.randn(4096, 64), torch.randn(2, 64))
    run_pass(InsertZeroCollectives(), gm, GLOO)
    table = (("exchange_by_messages", Link(1e-3, 1e9)), ("all_to_all_single", Link(1e-4, 1e8)))
    costs = replace(_costs(), links={"0": LinkTable(Link(9.0, 1.0), table)})
    (note,) = run_pass(ChooseCollectiveAlgorithms(), gm, GLOO, costs=costs).notes
    assert note.startswith("2 of 3 reductions use all_to_all_single, which is predicted to save")
    kinds = [collective_kind(started) for started in collectives(gm)]
    assert kinds == ["all_to_all_single", "exchange_by_messages", "all_to_all_single"]


@pytest.mark.parametrize(("count", "kind"), [(1, "all_to_all_single"), (2, "exchange_by_messages")])
def test_several_gradients_of_a_unit_use_messages(count, kind):
    gm = trace(lambda *grads: tuple(reduce(grad, (2, 3)) for grad in grads), *(torch.randn(4, 3) for _ in range(count)))
    run_pass(InsertZeroCollectives(), gm, GLOO)
    grads = placeholders(gm)
    with gm.graph.inserting_after(grads[-1]):
        unit = gm.graph.call_function(RUN_BACKWARD, (0, [], []))
    for number, grad in enumerate(grads):
        with gm.graph.inserting_after(unit):
            grad.replace_all_uses_with(item := gm.graph.call_function(operator.getitem, (unit, number)))
        item.meta = dict(grad.meta)
    unit.meta["val"] = tuple(grad.meta["val"] for grad in grads)
    run_pass(ChooseCollectiveAlgorithms(), gm, GLOO, costs=_favouring("all_to_all_single"))
    assert [collective_kind(started) for started in collectives(gm)] == [kind] * count


def test_more_than_two_ranks_never_take_the_reduction_that_adds_in_another_order():
    axis = replace(GLOO, size=3)
    gm = _lowered(torch.randn(6, 3), axis=axis)
    run_pass(ChooseCollectiveAlgorithms(), gm, axis, costs=_favouring("reduce_scatter_tensor", axis))
    FileCheck().check("exchange_by_messages").run(code(gm))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [(3, 2), (2, 2, 2)])
def test_all_forms_give_the_same_numbers_and_ranks_choose_alike(rows, form):
    torch.manual_seed(0)
    axis = replace(GLOO, size=len(rows))
    inputs = [[torch.randn(sum(rows), 3)] for _ in rows]
    outputs = []
    for costs in (_favouring(form, axis), CostModel.default((axis,))):
        graphs = [_lowered(*given, rows=own, axis=axis) for given, own in zip(inputs, rows, strict=True)]
        for gm in graphs:
            run_pass(ChooseCollectiveAlgorithms(), gm, axis, costs=costs)
        outputs.append(lockstep.run(graphs, inputs))
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_gathers_go_by_messages_even_where_gloos_own_are_faster():
    gm = _gathering(torch.randn(3, 3))
    costs = _costs(gather_by_messages=0.002, all_gather_into_tensor=0.001)
    run_pass(ChooseCollectiveAlgorithms(), gm, GLOO, costs=costs)
    FileCheck().check("gather_by_messages").run(code(gm))


def test_other_backends_keep_their_own():
    gm = _lowered(torch.randn(4, 3), axis=SHARD)
    before = code(gm)
    for costs in (CostModel.default((SHARD,)), _favouring("all_to_all_single", SHARD)):
        assert run_pass(ChooseCollectiveAlgorithms(), gm, SHARD, costs=costs) == PassResult()
    assert code(gm) == before


@pytest.mark.parametrize("how", [("max", "0"), ("sum", "a group of the user's")])
def test_other_reductions_and_groups_are_left_alone(how):
    op, group = how

    def function(a):
        return (c10d.wait_tensor(c10d.reduce_scatter_tensor(a, op, 2, group)),)

    gm = trace(function, torch.randn(4, 3))
    before = code(gm)
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 0
    assert code(gm) == before


def test_sums_of_integers_keep_their_dtype():
    gm = trace(
        lambda a: (c10d.wait_tensor(c10d.reduce_scatter_tensor(a, "sum", 2, "0")),),
        torch.ones(4, 3, dtype=torch.int32),
    )
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 1
    (output,) = gm.graph.find_nodes(op="output")
    assert fake_value(output.args[0][0]).dtype is torch.int32


def test_sizes_that_vary_are_left_alone():
    gm = make_fx(lambda a: (c10d.wait_tensor(c10d.reduce_scatter_tensor(a, "sum", 2, "0")),), tracing_mode="symbolic")(
        torch.randn(4, 3)
    )
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 0


def test_a_second_run_changes_nothing():
    gm = _lowered(torch.randn(4, 3))
    run_pass(ChooseCollectiveAlgorithms(), gm, GLOO)
    before = code(gm)
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 0
    assert code(gm) == before


def test_it_needs_the_collectives():
    with pytest.raises(PassError, match=r"requires 'zero-collectives'.*move choose_collective_algorithms after"):
        Pipeline([ChooseCollectiveAlgorithms(), InsertZeroCollectives()])

"""The joint graph of a recorded step."""

from __future__ import annotations

from keyword import iskeyword

import pytest
import torch
from torch import nn
from torch.fx import Node
from torch.testing import FileCheck

import dsgraph
from dsgraph.inductor_ext.units import RUN_BACKWARD, RUN_FORWARD
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import partition_states
from dsgraph.partitioning.step.step_graph import JointStep, joint_graph
from dsgraph.partitioning.step.step_record import UNCOMPILED, StepRecord, StepUnit, Work
from dsgraph.passes.compat import is_tangent
from tests.passes.tracing import code

pytestmark = pytest.mark.usefixtures("fake_ranks")

_RANKS = 8
_REDUCE = torch.ops.dsgraph.reduce_grad.default


def _parameters() -> list[ParameterState]:
    """Return the parameters 0.weight, 0.bias, 1.weight, 1.bias."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    (state,) = partition_states(dsgraph.partition(model, stage=3, keep_whole_below=0))
    return state.parameters


def _record(*units: tuple[ParameterState, ...], trains: bool = True, **how: frozenset[ParameterState]) -> StepRecord:
    """Return the record of units with these parameters, each of which reads the result of the one before."""
    record, value = StepRecord(**how), torch.empty(2, 16)
    for number, entries in enumerate(units):
        unit = StepUnit(f"unit {number}", work=Work(operations=number + 1))
        assert record.begin(unit, (tuple(map(id, entries)), trains), entries, [value]) == number
        value = torch.empty(2, 16)
        record.end(number, (value,), saved_bytes=100 + number)
    if trains:
        for number in reversed(range(len(units))):
            record.backward.append(number)
            record.calls[number].trained = units[number]
    return record


def _joint(record: StepRecord) -> JointStep:
    joint = joint_graph(record, lambda work: work.operations * 1e-3)
    joint.gm.graph.lint()
    return joint


def _runs(joint: JointStep, target: object) -> list[Node]:
    return joint.gm.graph.find_nodes(op="call_function", target=target)


def test_uncompiled_code_counts_as_a_linear_layer():
    weight, bias, *_ = _parameters()
    record = StepRecord()
    record.begin(UNCOMPILED, (), (weight, bias), [])
    record.end(0, (torch.empty(3, 5, 16),), 0)
    record.begin(UNCOMPILED, (), (weight, bias), [])
    record.begin(UNCOMPILED, (), (weight, bias), [])
    rows = 3 * 5
    layer = Work(2 * rows * 16 * 16, 2 * rows * 16 * 4, "float32")
    assert [call.unit.work for call in record.calls] == [Work(), layer, layer]


def test_units_markers_and_reductions_are_in_the_order_of_the_step():
    first, _, second, bias = _parameters()
    joint = _joint(_record((first,), (second, bias)))
    FileCheck().check("def forward(self, p_0_weight, p_1_weight, p_1_bias, batch, tangents_1)").check(
        "gather_param_default = torch.ops.dsgraph.gather_param.default(p_0_weight, None, [16, 16]"
    ).check("run_0 = torch.ops.dsgraph.run_forward.default(0, [batch], [gather_param_default])").check(
        "getitem = run_0[0]"
    ).check("getitem_1 = run_0[1]").check("getitem_2 = run_0[2]").check(
        "run_1 = torch.ops.dsgraph.run_forward.default(1, [getitem, getitem_2], "
        "[gather_param_default_1, gather_param_default_2])"
    ).check(
        "run_1_backward = torch.ops.dsgraph.run_backward.default(1, [getitem_4, tangents_1], [gather_param_default_1,"
    ).check(
        "run_0_backward = torch.ops.dsgraph.run_backward.default(0, [getitem_1, getitem_6], [gather_param_default])"
    ).check("reduce_grad").check("return (getitem_3, getitem_5, reduce_grad_default").run(code(joint.gm))
    assert joint.entries == (first, second, bias) and joint.copies == () and joint.results == 2


def test_nodes_have_the_sizes_and_times_of_the_step():
    first, _, second, _ = _parameters()
    joint = _joint(_record((first,), (second,)))
    forwards, backwards = _runs(joint, RUN_FORWARD), _runs(joint, RUN_BACKWARD)
    assert [tuple(value.shape) for value in forwards[1].meta["val"]] == [(2, 16), (101,), (1,)]
    assert [tuple(value.shape) for value in backwards[0].meta["val"]] == [(2, 16), (16, 16)]
    assert [node.meta["seconds"] for node in (*forwards, *backwards)] == [1e-3, 2e-3, 4e-3, 2e-3]
    assert [node.meta["unit"] for node in (*forwards, *backwards)] == ["unit 0", "unit 1", "unit 1", "unit 0"]
    shard = joint.gm.graph.find_nodes(op="placeholder")[0]
    assert tuple(shard.meta["val"].shape) == (16 // _RANKS, 16)


def test_a_parameter_that_two_units_read_is_reduced_for_each_of_them():
    first, _, second, _ = _parameters()
    joint = _joint(_record((first,), (second, first)))
    FileCheck().check("def forward(self, p_0_weight, p_1_weight, batch").check("run_1_backward").check(
        "reduce_grad_default_1 = torch.ops.dsgraph.reduce_grad.default(getitem_8,"
    ).check("run_0_backward").check("reduce_grad_default_2 = torch.ops.dsgraph.reduce_grad.default(getitem_10,").check(
        "reduce_grad_default, reduce_grad_default_1, reduce_grad_default_2)"
    ).run(code(joint.gm))
    assert joint.gradients == (second, first, first)
    assert len(_runs(joint, _REDUCE)) == 3 and len(_runs(joint, torch.ops.dsgraph.gather_param.default)) == 3


def test_a_held_copy_is_an_input_of_its_marker():
    first, _, second, _ = _parameters()
    joint = _joint(_record((first,), (second,), held=frozenset({second})))
    FileCheck().check("def forward(self, p_0_weight, p_1_weight, p_1_weight_held, batch, tangents_1)").check(
        "gather_param.default(p_0_weight, None,"
    ).check("gather_param.default(p_1_weight, p_1_weight_held, [16, 16]").run(code(joint.gm))
    assert joint.entries == (first, second) and joint.copies == (second,)
    held = joint.gm.graph.find_nodes(op="placeholder")[2]
    assert tuple(held.meta["val"].shape) == (16, 16)


def test_a_parameter_without_a_gradient_has_no_reduction():
    first, _, second, bias = _parameters()
    record = _record((first,), (second, bias))
    joint = _joint(record.without(frozenset({second})))
    *results, grad_bias, grad_first = joint.gm.graph.output_node().args[0]
    assert joint.gradients == (bias, first) and {grad_first.target, grad_bias.target} == {_REDUCE}
    assert len(results) == joint.results
    assert record.calls[1].trained == (second, bias), "the record itself stays"


def test_a_forward_alone_has_no_tangent():
    first, _, second, _ = _parameters()
    joint = _joint(_record((first,), (second,), trains=False))
    FileCheck().check("def forward(self, p_0_weight, p_1_weight, batch)").check_not("backward").check_not(
        "reduce_grad"
    ).run(code(joint.gm))


def test_uncompiled_code_keeps_what_it_has_read():
    first, _, second, _ = _parameters()
    record = _record((first,), (second,))
    record.calls[1].outputs = ()
    first_backward, second_backward = _runs(_joint(record), RUN_BACKWARD)
    assert first_backward.args[2] == [] and len(second_backward.args[2]) == 1


@pytest.mark.parametrize(
    "names",
    [
        ("0.weight",),
        ("1",),
        ("a-b.ä",),
        *((name,) for name in ("lambda", "batch", "tangents_1", "tangents")),
        ("blocks.1.weight", "blocks_1.weight"),
    ],
    ids=" ".join,
)
def test_parameters_of_any_name_are_placeholders(names):
    entries = tuple(_parameters()[: len(names)])
    for entry, name in zip(entries, names, strict=True):
        object.__setattr__(entry.spec, "name", name)
    joint = _joint(_record(entries))
    inputs = joint.gm.graph.find_nodes(op="placeholder")
    assert len({node.target for node in inputs}) == len(inputs) == len(names) + 2
    assert all(node.target.isidentifier() and not iskeyword(node.target) for node in inputs)
    assert [is_tangent(node) for node in inputs] == [False] * (len(names) + 1) + [True]

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from dsgraph.passes import GraphPass, PassContext, PassError, Phase, Pipeline, Runner, graph_pass
from dsgraph.passes.ir.graph import emit, find_calls, replace_and_erase, sort_topologically
from dsgraph.passes.verify import verifier
from tests.passes.tracing import code, trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def _run(function, gm, **how):
    Runner(Pipeline([graph_pass(phase="joint", **how)(function)])).run(gm, PassContext(phase=Phase.JOINT))


def _graph():
    def function(x, y):
        first = c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))
        second = c10d.wait_tensor(c10d.all_reduce(y, "sum", "0"))
        return first + 1, second * 2, x

    return trace(function, torch.randn(3), torch.randn(3))


def test_records_what_a_pass_did():
    def double(gm, ctx):
        for node in find_calls(gm, aten.add.Tensor):
            replace_and_erase(node, emit(node, aten.mul.Tensor, node.args[0], 2))
        return 1

    gm = _graph()
    runner = Runner(Pipeline([graph_pass(phase="joint")(double)]))
    runner.run(gm, PassContext(phase=Phase.JOINT))
    (record,) = runner.records
    assert (record.name, record.changed, record.phase) == ("double", 1, Phase.JOINT)
    assert record.nodes_before == record.nodes_after


def test_removes_dead_code():
    def add_useless(gm, ctx):
        emit(list(gm.graph.nodes)[-1], aten.sin.default, next(iter(gm.graph.nodes)))
        return 1

    gm = _graph()
    before = code(gm)
    _run(add_useless, gm)
    assert code(gm) == before


def test_passes_of_other_phases_do_not_run():
    def fail(gm, ctx):
        raise AssertionError

    runner = Runner(Pipeline([graph_pass(phase="forward")(fail)]))
    runner.run(_graph(), PassContext(phase=Phase.JOINT))
    assert runner.records == []


def drop_a_wait(gm, ctx):
    wait = find_calls(gm, c10d.wait_tensor.default)[0]
    replace_and_erase(wait, wait.args[0])
    return 1


def wait_twice(gm, ctx):
    wait = find_calls(gm, c10d.wait_tensor.default)[0]
    again = emit(wait, c10d.wait_tensor.default, wait.args[0])
    find_calls(gm, aten.add.Tensor)[0].replace_input_with(wait, again)
    find_calls(gm, aten.mul.Tensor)[0].replace_input_with(find_calls(gm, c10d.wait_tensor.default)[2], wait)
    return 1


def swap_collectives(gm, ctx):
    first, second = find_calls(gm, c10d.all_reduce.default)
    first.prepend(second)
    return 1


def drop_an_output(gm, ctx):
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (output.args[0][:-1],)
    return 1


def unalias_an_output(gm, ctx):
    (output,) = gm.graph.find_nodes(op="output")
    *others, last = output.args[0]
    output.args = ((*others, emit(output, aten.clone.default, last)),)
    return 1


def add_an_input(gm, ctx):
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(first):
        gm.graph.placeholder("extra")
    return 1


def use_before_definition(gm, ctx):
    add = find_calls(gm, aten.add.Tensor)[0]
    find_calls(gm, c10d.all_reduce.default)[0].prepend(add)
    return 1


def raise_an_error(gm, ctx):
    raise KeyError("stage")


def return_nothing(gm, ctx):
    return None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop_a_wait, r"after pass drop_a_wait, collective all_reduce has 0 waits"),
        (wait_twice, r"after pass wait_twice, collective all_reduce has 2 waits"),
        (swap_collectives, r"pass swap_collectives moved collective all_reduce_1 before all_reduce in group '0'"),
        (drop_an_output, r"pass drop_an_output changed the number of outputs from 3 to 2"),
        (unalias_an_output, r"pass unalias_an_output changed output 2, which was 'x_1'"),
        (add_an_input, r"pass add_an_input changed the graph's inputs"),
        (use_before_definition, r"pass use_before_definition left a malformed joint graph"),
        (raise_an_error, r"pass raise_an_error \(joint graph\) failed: KeyError: 'stage' \(at .*test_runner.py:\d+\)"),
        (return_nothing, r"pass return_nothing .*returned None"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_are_caught_and_named(fault, message):
    with pytest.raises(PassError, match=message):
        _run(fault, _graph())


def leave_alone(gm, ctx):
    return 0


def leave_alone_too(gm, ctx):
    return 0


@pytest.mark.parametrize(
    ("fault", "message"), [(drop_a_wait, "has 0 waits"), (use_before_definition, "left a malformed joint graph")]
)
def test_a_fault_is_caught_after_passes_that_change_nothing_and_though_its_pass_says_so(fault, message):
    def lie(gm, ctx):
        return 0 * fault(gm, ctx)

    pipeline = Pipeline([graph_pass(phase="joint")(each) for each in (leave_alone, leave_alone_too, lie)])
    with pytest.raises(PassError, match=f"pass lie,? .*{message}|pass lie {message}"):
        Runner(pipeline).run(_graph(), PassContext(phase=Phase.JOINT))


def test_a_graph_that_a_pass_has_left_alone_is_checked_once(monkeypatch):
    checked = []
    observe = verifier._observe
    monkeypatch.setattr(verifier, "_observe", lambda gm, ctx: checked.append(gm) or observe(gm, ctx))
    pipeline = Pipeline([graph_pass(phase="joint")(each) for each in (leave_alone, leave_alone_too)])
    Runner(pipeline).run(_graph(), PassContext(phase=Phase.JOINT))
    assert len(checked) == 1


def test_a_class_whose_run_returns_nothing_is_named():
    @dataclass(frozen=True)
    class Nothing(GraphPass):
        phase: ClassVar[Phase] = Phase.JOINT

        def run(self, gm, ctx):
            return None

    with pytest.raises(PassError, match="pass nothing returned None; `run` returns a PassResult"):
        Runner(Pipeline([Nothing()])).run(_graph(), PassContext(phase=Phase.JOINT))


def test_a_pass_may_reorder_collectives_if_it_says_so():
    gm = _graph()
    _run(swap_collectives, gm, reorders_collectives=True)
    assert code(gm).index("all_reduce_1 =") < code(gm).index("all_reduce =")


def test_the_sink_sees_every_step():
    steps = []

    class Sink:
        def write(self, gm, ctx, *, number, record):
            steps.append(f"{ctx.phase.value} {number} {record.name if record else 'before'}")

    def nothing(gm, ctx):
        return 0

    Runner(Pipeline([graph_pass(phase="joint")(nothing)]), sink=Sink()).run(_graph(), PassContext(phase=Phase.JOINT))
    assert steps == ["joint 0 before", "joint 1 nothing"]


@pytest.mark.parametrize("fault", [raise_an_error, use_before_definition, drop_a_wait])
def test_the_sink_sees_what_a_refused_pass_has_left(fault):
    notes = []

    class Sink:
        def write(self, gm, ctx, *, number, record):
            notes.extend(record.notes if record else ())
            if number:
                raise ValueError("this graph cannot be drawn")

    with pytest.raises(PassError, match=fault.__name__):
        Runner(Pipeline([graph_pass(phase="joint")(fault)]), sink=Sink()).run(_graph(), PassContext(phase=Phase.JOINT))
    (note,) = notes
    assert note.startswith("refused: ") and fault.__name__ in note


def test_topological_sort_moves_only_what_must_move():
    gm = trace(lambda x: (x.sin().cos(), x + 1), torch.randn(3))
    sin, cos, add = (find_calls(gm, op)[0] for op in (aten.sin.default, aten.cos.default, aten.add.Tensor))
    sin.prepend(cos)
    sort_topologically(gm.graph)
    order = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert order == [sin, cos, add]
    gm.graph.lint()


def test_a_circle_is_an_error():
    gm = trace(lambda x: (x.sin().cos(),), torch.randn(3))
    sin, cos = find_calls(gm, aten.sin.default)[0], find_calls(gm, aten.cos.default)[0]
    sin.args = (cos,)
    with pytest.raises(ValueError, match="circle"):
        sort_topologically(gm.graph)

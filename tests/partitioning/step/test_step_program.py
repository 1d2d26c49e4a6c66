"""Programs of step graphs: their text, what runs at each stop, when memory is freed, and how they are run out."""

from __future__ import annotations

import operator
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.testing import FileCheck

from dsgraph.inductor_ext.units import RUN_BACKWARD, RUN_FORWARD
from dsgraph.partitioning.step.step_program import Program, Run, lower

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_GRAD = torch.zeros(3)

pytestmark = pytest.mark.usefixtures("one_rank")


def _group() -> str:
    return dist.group.WORLD.group_name


class _Made(Graph):
    """A graph that is written by hand."""

    def call(self, name: str, target: Any, *args: Any, value: Any = None) -> Node:
        node = self.create_node("call_function", target, args, name=name)
        node.meta["val"] = value
        return node

    def gather(self, shard: Node) -> Node:
        return self.call(f"{shard.name}_full", _WAIT, self.call(f"{shard.name}_started", _GATHER, shard, 1, _group()))

    def lowered(self, *results: Any, **how: Any) -> Program:
        self.output(tuple(results))
        return lower(GraphModule(nn.Module(), self), **how)


def _forward() -> Program:
    """Two units, of which the second one's parameter is gathered before the first and is kept for the backward."""
    graph = _Made()
    a, b, batch = (graph.placeholder(name) for name in ("a", "b", "batch"))
    full_a = graph.gather(a)
    started = graph.call("b_started", _GATHER, b, 1, _group())
    run = graph.call("run_0", RUN_FORWARD, 0, [batch], [full_a])
    hidden, saved = (graph.call(name, operator.getitem, run, at) for at, name in enumerate(("hidden", "saved")))
    full_b = graph.call("b_full", _WAIT, started)
    run_1 = graph.call("run_1", RUN_FORWARD, 1, [hidden], [full_b])
    loss = graph.call("loss", operator.getitem, run_1, 0)
    return graph.lowered(loss, saved, full_b, keep=("saved", "b_full", "a", "elsewhere"), shards=("a", "b"))


def test_the_text_of_a_forward_has_gathers_and_stops_and_nothing_of_units():
    program = _forward()
    FileCheck().check("def forward(self, to, a, b)").check("a_started = ").check("a_full = ").check(
        "b_started = "
    ).check("yield (0, [], [a_full])").check("(yield)").check_next("b_full = ").check_next(
        "yield (1, [], [b_full])"
    ).check_next("return (b_full,)").run(program.text)
    FileCheck().check_not("getitem").check_not("batch").check_not("run_forward").run(program.text)
    assert (program.inputs, program.kept, program.calls) == (("a", "b"), ("b_full",), (0, 1))
    assert not program.gradients


def test_a_forward_stops_at_units_and_before_it_waits():
    shards = torch.ones(2), torch.full((2,), 2.0)
    run = _run(_forward(), *shards)
    assert run.next_call == 0
    (full,) = run.enter()
    assert torch.equal(full, shards[0]) and run.enter()[0] is full
    run.leave()
    assert (run.next_call, run.place) == (1, 1)
    (full,) = run.enter()
    assert torch.equal(full, shards[1]) and not run.kept
    run.leave()
    assert run.next_call == -1 and list(run.kept) == ["b_full"] and run.kept["b_full"] is full


def _is_freed(reference: weakref.ref[Tensor]) -> bool:
    """Return whether a tensor is gone as soon as the thread that gathered it lets go."""
    ends = time.monotonic() + 10
    while reference() is not None and time.monotonic() < ends:
        time.sleep(0.01)
    return reference() is None


def test_a_full_parameter_is_freed_when_its_unit_is_left():
    run = _run(_forward(), torch.ones(2), torch.ones(2))
    alive = [weakref.ref(full) for full in run.enter()]
    run.leave()
    assert _is_freed(alive[0])
    alive = [weakref.ref(full) for full in run.enter()]
    run.leave()
    assert alive[0]() is run.kept["b_full"]
    run.kept.clear()
    assert _is_freed(alive[0])


def test_a_forward_in_inference_mode_gathers_tensors_that_can_be_trained():
    run = _run(_forward(), torch.ones(2), torch.ones(2))
    with torch.inference_mode():
        (full,) = run.enter()
        run.leave()
    assert not full.is_inference() and not run.enter()[0].is_inference()


def _backward() -> Program:
    """Units 1 and 0, whose gradients are doubled; those of unit 1 after unit 0 has run."""
    graph = _Made()
    a, saved, tangent = (graph.placeholder(name) for name in ("a", "saved", "tangents_1"))
    first = graph.call("run_1_backward", RUN_BACKWARD, 1, [saved, tangent], [], value=(_GRAD, _GRAD))
    before, grad_b = (graph.call(name, operator.getitem, first, at) for at, name in enumerate(("before", "grad_b")))
    full = graph.gather(a)
    second = graph.call("run_0_backward", RUN_BACKWARD, 0, [before], [full], value=(_GRAD, _GRAD, _GRAD))
    grad_a, grad_c = (graph.call(name, operator.getitem, second, at) for at, name in ((1, "grad_a"), (2, "grad_c")))
    rows = [graph.call(f"rows_{grad.name[-1]}", torch.mul, grad, 2) for grad in (grad_a, grad_b)]
    return graph.lowered(*rows, grad_c, None, gradients=range(4), shards=("a",))


def test_a_backward_delivers_gradients_where_they_are_computed():
    program = _backward()
    FileCheck().check("def forward(self, to, a)").check("yield (1, [], [])").check("grad_b = ").check("(yield)").check(
        "a_full = "
    ).check("yield (0, [], [a_full])").check("grad_c = ").check_next("clone").check_next(
        "deliver(to, 2, clone_default)"
    ).check("rows_a =").check_next("deliver(to, 0, rows_a)").check("rows_b =").check_next(
        "deliver(to, 1, rows_b)"
    ).check("return ()").run(program.text)
    assert {number: len(grads) for number, grads in program.gradients.items()} == {1: 1, 0: 2}
    found: dict[int, float] = {}
    run = _run(program, torch.ones(2), to=found)
    run.enter()
    run.leave([torch.full((3,), 10.0)])
    assert not found and run.next_call == 0
    run.leave([torch.full((3,), 20.0), torch.full((3,), 30.0)])
    assert found == {0: 40, 1: 20, 2: 30} and run.next_call == -1


def test_gradients_are_taken_out_of_the_list_that_is_given():
    run = _run(_backward(), torch.ones(2), to={})
    run.leave([torch.ones(3)])
    given = [torch.ones(3), torch.ones(3)]
    run.leave(given)
    assert given == [None, None]


def test_a_program_is_run_out_with_zeros():
    found: dict[int, float] = {}
    run = _run(_backward(), torch.ones(2), to=found)
    run.run_out({})
    assert found == {0: 0, 1: 0, 2: 0} and run.next_call == -1
    run.run_out({})


def test_gradients_of_the_running_unit_are_given_and_the_others_are_zeros():
    found: dict[int, float] = {}
    run = _run(_backward(), torch.ones(2), to=found)
    run.leave([torch.full((3,), 10.0)])
    run.run_out({1: torch.full((3,), 5.0)})
    assert found == {0: 0, 1: 20, 2: 5}


def test_what_is_given_belongs_to_one_unit():
    found: dict[int, float] = {}
    run = _run(_backward(), torch.ones(2), to=found)
    run.run_out({0: torch.full((3,), 10.0)})
    assert found == {0: 0, 1: 20, 2: 0}


def test_a_program_without_units_has_no_stop():
    graph = _Made()
    a = graph.placeholder("a")
    program = graph.lowered(a, shards=("a",), keep=("a",))
    assert program.calls == () and program.inputs == ()
    run = _run(program)
    assert run.next_call == -1
    run.run_out({})


def _run(program: Program, *inputs: Tensor, to: dict[int, float] | None = None) -> Run:
    def deliver(number: int, gradient: Tensor) -> None:
        assert to is not None and number not in to
        to[number] = gradient.max().item()

    return Run(program, program.code(None, deliver, *inputs))

"""A step graph as a generator that stops at each unit; the operations that passes placed run between units."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext.units import RUN_BACKWARD, RUN_FORWARD
from dsgraph.passes.ir.coalesced import collective_behind
from dsgraph.passes.ir.collectives import is_gather
from dsgraph.passes.ir.gathers import is_unit
from dsgraph.passes.ir.graph import behind_views, is_wait
from dsgraph.utils.errors import PartitionError

Deliver = Callable[[int, Tensor], None]
Steps = Generator[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class Program:
    """The forward or the backward of a step, as code that stops at each unit.

    Attributes:
        text: The code. At a unit it yields `(number of the call, [], full parameters)`. A backward is then sent the
            list of the unit's gradients, and takes each one out of the list.
        code: The generator function. Arguments: None (FX's `self`), a `Deliver`, then the inputs.
        inputs: Names of the inputs: shards, held copies, and values that the forward keeps for the backward.
        kept: Names of the results, which the backward takes.
        calls: Numbers of the units' calls, in their order.
        gradients: Number of a call -> fake gradients that its backward computes.
    """

    text: str
    code: Callable[..., Steps]
    inputs: tuple[str, ...]
    kept: tuple[str, ...]
    calls: tuple[int, ...]
    gradients: Mapping[int, tuple[Tensor, ...]]


def pause() -> None:
    """Stand for a stop between a unit and the next wait for a gather, in a graph that becomes a program."""


def take(gradients: list[Any], number: int) -> Tensor:
    """Take a gradient that a unit has computed out of a list, so that it is freed when it is reduced."""
    found: Tensor = gradients[number - 1]
    gradients[number - 1] = None
    return found


def deliver(to: Deliver, number: int, gradient: Tensor) -> None:
    """Hand over a reduced gradient."""
    to(number, gradient)


def lower(
    gm: GraphModule, *, keep: Collection[str] = (), gradients: Collection[int] = (), shards: Collection[str] = ()
) -> Program:
    """Return the program of a step's forward or backward graph, which is consumed.

    Args:
        gm: The graph, after all passes.
        keep: Names of the nodes that the backward takes.
        gradients: Numbers of the outputs that are gradients.
        shards: Names of the placeholders that are shards.
    """
    graph = gm.graph
    units = [node for node in graph.nodes if is_unit(node)]
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    named = {node.name: node for node in graph.nodes}
    kept = [named[name] for name in keep if name in named and not _is_of_unit(named[name]) and name not in shards]
    output.args = (tuple(kept),)
    with graph.inserting_before(next(iter(graph.nodes))):
        to = graph.placeholder("to")
    for number in gradients:
        if isinstance(results[number], Node):
            _deliver(results[number], to, number)
    for unit in units:
        unit.args = (unit.args[0], [], unit.args[2])
    for node in reversed(graph.nodes):
        if _is_of_unit(node):
            node.target = take
            if not node.users:
                graph.erase_node(node)
    for unit in units:
        node = unit.next
        while node.op == "call_function" and node not in units and not _awaits_gather(node):
            node = node.next
        if _awaits_gather(node):
            with graph.inserting_before(node):
                graph.call_function(pause)
    inputs = [node for node in graph.find_nodes(op="placeholder") if node is not to]
    for node in inputs:
        if not node.users:
            graph.erase_node(node)
    text, code = _as_generator(gm)
    return Program(
        text,
        code,
        tuple(node.name for node in inputs if node.users),
        tuple(node.name for node in kept),
        tuple(unit.args[0] for unit in units),
        {unit.args[0]: unit.meta["val"][1:] for unit in units if unit.target is RUN_BACKWARD},
    )


def _is_of_unit(node: Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and is_unit(source)


def _awaits_gather(node: Node) -> bool:
    return is_wait(node) and is_gather(collective_behind(node))


def _deliver(gradient: Node, to: Node, number: int) -> None:
    """Insert the delivery of a gradient where it is complete."""
    if _is_of_unit(behind_views(gradient)):  # of one rank: several parameters may have one gradient
        gradient = _insert_after(gradient, torch.ops.aten.clone.default, (gradient,))
    _insert_after(gradient, deliver, (to, number, gradient))


def _insert_after(node: Node, target: Callable[..., Any], args: tuple[Any, ...]) -> Node:
    with node.graph.inserting_after(node):
        return node.graph.call_function(target, args)


def _as_generator(gm: GraphModule) -> tuple[str, Callable[..., Steps]]:
    """Return FX's code of a graph as a generator function, and its text."""
    code = gm.graph.python_code("self")
    text = code.src
    for name in (name for name, value in code.globals.items() if value is pause):
        text = text.replace(f"{name}()", "(yield)")
    for unit in (RUN_FORWARD, RUN_BACKWARD):
        text = text.replace(f"torch.ops.{unit}(", "yield (")
    known = dict(code.globals)
    exec(compile(text + "\n    yield\n" * ("yield" not in text), "<step graph>", "exec"), known)
    return text, known["forward"]


@dataclass(eq=False)
class Run:
    """A program that is being run, from unit to unit.

    Attributes:
        program: The program.
        steps: Its generator.
        place: Number of units that have been left.
        kept: Results of the program by name, after it has ended.
    """

    program: Program
    steps: Steps
    place: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    _full: list[Tensor] | None = None
    _has_ended: bool = False

    @property
    def next_call(self) -> int:
        """Number of the next unit's call; -1 at the end."""
        return self.program.calls[self.place] if self.place < len(self.program.calls) else -1

    def enter(self) -> list[Tensor]:
        """Run what comes before the next unit, and return its full parameters."""
        while self._full is None:
            if self._has_ended:
                raise PartitionError("a gather or reduction of this step has failed: begin another step")
            self._go_on(None)
        return self._full

    def leave(self, gradients: Sequence[Tensor | None] = ()) -> None:
        """Go on after the unit up to the next wait for a gather, after the last unit to the end.

        Args:
            gradients: The full gradients that the unit has computed, which are taken out of the list.
        """
        self.enter()
        self._full, self.place = None, self.place + 1
        self._go_on(gradients)
        while self.place == len(self.program.calls) and not self._has_ended:
            self._go_on(None)

    def run_out(self, gradients: Mapping[int, Tensor]) -> None:
        """Run what is left, so that other ranks do not wait: gradients that are not given count as zeros.

        Args:
            gradients: Number of a gradient of the running unit -> its value.
        """
        while not self._has_ended and self.place < len(self.program.calls):
            like = self.program.gradients.get(self.next_call, ())
            zeros = (torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in like)
            self.leave([gradients.get(number, zero) for number, zero in enumerate(zeros)])
            gradients = {}

    def _go_on(self, sent: Sequence[Any] | None) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():  # a later unit may be trained
                found = self.steps.send(sent)
            if found is not None:
                self._full = found[2]
        except StopIteration as end:
            self._has_ended = True
            self.kept = dict(zip(self.program.kept, end.value or (), strict=False))
        except BaseException:  # of a collective, or without memory: nothing can follow
            self._has_ended = True
            raise

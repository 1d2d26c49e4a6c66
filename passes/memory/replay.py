"""The memory of a joint graph's forward and backward under a choice of what is saved, without splitting the graph."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from torch.fx import GraphModule, Node

from dsgraph.passes.ir.blocks import block_of, module_of

from .forward_values import ForwardValues, sources_of


@dataclass(frozen=True)
class Replay:
    """A step of a joint graph. Bytes are those that the graph itself allocates.

    Attributes:
        forward: Bytes alive while each node of the forward runs.
        backward: The same of the backward.
        forward_parts: The number of the part of each node of the forward.
        backward_parts: For each node of the backward: the part that it differentiates or recomputes.
        saved: Bytes that each part saves.
        repeated: The values that the backward recomputes.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    forward_parts: tuple[int, ...]
    backward_parts: tuple[int, ...]
    saved: tuple[int, ...]
    repeated: frozenset[Node]

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max((*self.forward, *self.backward), default=0)


@dataclass(frozen=True)
class _Footprint:
    """The memory of one node's results.

    Attributes:
        inputs: The node's inputs.
        roots: The pieces of memory of its value.
        own: Those of them that it allocates, with their bytes.
        inside: Bytes that it uses while it runs.
        inlined: Bytes of a result that is in memory only if it is saved; otherwise 0.
    """

    inputs: tuple[Node, ...]
    roots: tuple[str, ...]
    own: tuple[tuple[str, int], ...]
    inside: int
    inlined: int


@dataclass(frozen=True)
class ReplayedGraph:
    """A joint graph, with what all replays of it have in common.

    Attributes:
        values: Its forward.
    """

    values: ForwardValues

    @cached_property
    def footprints(self) -> dict[Node, _Footprint]:
        """The memory of each node's results."""
        return {node: self._footprint(node) for node in self.values.gm.graph.nodes}

    def _footprint(self, node: Node) -> _Footprint:
        memory, value = self.values.memory, self.values.values.get(node)
        roots, inside = memory.roots.get(node.name, ()), memory.by_name.get(f"{node.name}:inside")
        own = tuple((name, memory.by_name[name].bytes) for name in roots if name.partition(":")[0] == node.name)
        is_inlined = not own and node.target is not operator.getitem
        return _Footprint(
            tuple(node.all_input_nodes),
            roots,
            own,
            inside=inside.bytes if inside is not None else 0,
            inlined=value.bytes if is_inlined and value is not None else 0,
        )

    @cached_property
    def blocks(self) -> dict[Node, int]:
        """Node of a block that depends on a gradient -> the part that it differentiates; -1 if there is none."""
        numbers = {part.name: number for number, part in enumerate(self.values.parts) if part.name}
        found = {node: block_of(module_of(node) or "") for node in self.values.gradients}
        return {node: numbers.get(".".join(block), -1) for node, block in found.items() if block is not None}


def replay(graph: ReplayedGraph, saved: Collection[Node], offloaded: Collection[Node] = ()) -> Replay:
    """Simulate a step: the backward recomputes what is not saved, each value directly before its first use.

    Args:
        graph: A joint graph.
        saved: The saved values.
        offloaded: The values that are offloaded from their last use in the forward to their first in the backward.
    """
    values, kept = graph.values, frozenset((*saved, *offloaded))
    ahead = _ahead(values, kept)
    behind = list(backward_steps(values.gm, values.gradients, kept))
    memory = _Memory(graph, kept)
    for node in ahead:
        memory.run(node)
    memory.leave(offloaded)
    for node, _ in behind:
        memory.run(node)
    live = memory.live()
    return Replay(
        forward=tuple(live[: len(ahead)]),
        backward=tuple(live[len(ahead) :]),
        forward_parts=tuple(values.part_of[node] for node in ahead),
        backward_parts=tuple(_parts_behind(graph, behind)),
        saved=tuple(memory.saved(len(ahead))),
        repeated=frozenset(node for node, again in behind if again),
    )


def backward_steps(
    gm: GraphModule, gradients: Collection[Node], saved: Collection[Node]
) -> Iterator[tuple[Node, bool]]:
    """Yield the backward's nodes, each preceded by the nodes that it lacks, in program order: True for recomputed ones.

    Torch's partitioner orders them in the same way.

    Args:
        gm: A joint graph.
        gradients: See `of_gradients`.
        saved: The values of the forward that the backward does not compute.
    """
    waiting = _recomputed(gm, gradients, saved)
    number_of: dict[Node, int] = {}
    has_begun = False
    for node in gm.graph.nodes:
        number_of[node] = len(number_of)
        is_gradient = node in gradients and node.op == "call_function"
        has_begun |= is_gradient
        if not is_gradient and not (has_begun and node in waiting):
            continue
        lacking = [node]
        for source in lacking:
            new = waiting.intersection(source.all_input_nodes)
            waiting -= new
            lacking += new
        for source in sorted(lacking[1:], key=number_of.__getitem__):
            yield source, True
        waiting.discard(node)
        yield node, not is_gradient


def _recomputed(gm: GraphModule, gradients: Collection[Node], saved: Collection[Node]) -> set[Node]:
    """Return the values of the forward that the backward needs and does not have."""
    found: set[Node] = set()
    frontier = [node for node in gm.graph.nodes if node in gradients and node.op == "call_function"]
    for node in frontier:
        for source in node.all_input_nodes:
            is_given = source in saved or source in gradients or source.op != "call_function"
            if not is_given and source not in found:
                found.add(source)
                frontier.append(source)
    return found


def _ahead(values: ForwardValues, saved: frozenset[Node]) -> list[Node]:
    """Return the nodes of the forward: those that its results and saved values depend on."""
    needed = sources_of((*values.results, *saved))
    return [node for node in values.forward if node in needed]


@dataclass
class _Memory:
    """The places of values while nodes run, one after the other."""

    graph: ReplayedGraph
    kept: frozenset[Node]
    _bytes: list[int] = field(default_factory=list)  # of each piece of memory
    _first: list[int] = field(default_factory=list)
    _last: list[int] = field(default_factory=list)
    _piece: dict[str, int] = field(default_factory=dict)  # name of a root -> its newest piece
    _places: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    _makers: dict[int, Node] = field(default_factory=dict)
    _away: set[Node] = field(default_factory=set)
    _time: int = 0

    def leave(self, offloaded: Collection[Node]) -> None:
        """End the forward: offloaded values have memory again where the backward first reads them."""
        self._away.update(offloaded)

    def run(self, node: Node) -> None:
        found = self.graph.footprints[node]
        for source in found.inputs:
            if source in self._away:
                self._away.discard(source)
                self._place(source)
            for piece in self._places.get(source, ()):
                self._last[piece] = self._time
        self._place(node)
        if found.inside:  # while it runs
            self._allocate(node, found.inside)
        self._time += 1

    def _place(self, node: Node) -> None:
        found = self.graph.footprints[node]
        if found.inlined and node in self.kept:  # it would not be in memory otherwise
            self._places[node] = (self._allocate(node, found.inlined),)
            return
        for name, size in found.own:
            self._piece[name] = self._allocate(node, size)
        self._places[node] = tuple([self._piece[name] for name in found.roots if name in self._piece])

    def _allocate(self, node: Node, size: int) -> int:
        self._bytes.append(size)
        self._first.append(self._time)
        self._last.append(self._time)
        self._makers[len(self._bytes) - 1] = node
        return len(self._bytes) - 1

    def live(self) -> list[int]:
        """Return the bytes alive at each moment; results of the backward stay."""
        values, memory = self.graph.values, self.graph.values.memory
        leaving = {name for node in memory.outputs if node for name in memory.roots.get(node, ())}
        staying = {self._piece[name] for name in leaving if name in self._piece}
        changes = [0] * (self._time + 1)
        for piece, size in enumerate(self._bytes):
            is_result = piece in staying and self._makers[piece] not in values.part_of
            changes[self._first[piece]] += size
            changes[self._time if is_result else self._last[piece] + 1] -= size
        return list(accumulate(changes[: self._time]))

    def saved(self, border: int) -> list[int]:
        """Return the bytes of each part that outlive the forward, which ends at `border`."""
        values = self.graph.values
        found = [0] * len(values.parts)
        for piece, size in enumerate(self._bytes):
            if self._first[piece] < border <= self._last[piece]:
                found[values.part_of[self._makers[piece]]] += size
        return found


def _parts_behind(graph: ReplayedGraph, steps: list[tuple[Node, bool]]) -> Iterator[int]:
    """Yield the part of each step of the backward, which goes through parts from the last to the first.

    A node before its part, such as one that two blocks share, belongs to the current part.
    """
    found: list[int] = []
    current = 0
    for node, _ in reversed(steps):
        current = max(current, graph.blocks.get(node, -1))
        found.append(current)
    found.reverse()
    named = next((number for number, (node, _) in enumerate(steps) if node in graph.blocks), 0)
    yield from [len(graph.values.parts) - 1] * named
    yield from found[named:]

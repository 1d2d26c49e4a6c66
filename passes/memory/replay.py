"""The memory of a joint graph's forward and backward under a choice of what is saved, without splitting the graph."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from torch.fx import Node

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


def replay(values: ForwardValues, saved: Collection[Node], offloaded: Collection[Node] = ()) -> Replay:
    """Simulate a step: the backward recomputes what is not saved, each value directly before its first use.

    Args:
        values: The forward of a joint graph.
        saved: The saved values.
        offloaded: The values that are offloaded from their last use in the forward to their first in the backward.
    """
    kept = frozenset((*saved, *offloaded))
    ahead = _ahead(values, kept)
    behind = list(_backward(values, kept))
    memory = _Memory(values, kept)
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
        backward_parts=tuple(_parts_behind(values, behind)),
        saved=tuple(memory.saved(len(ahead))),
        repeated=frozenset(node for node, again in behind if again),
    )


def _backward(values: ForwardValues, saved: frozenset[Node]) -> Iterator[tuple[Node, bool]]:
    """Yield the backward's nodes, each preceded by the forward nodes that it needs: with True the recomputed ones."""
    forward = values.part_of
    done = set(saved)
    behind, inputs = values.gradients, values.inputs

    def is_missing(node: Node) -> bool:
        return node.op == "call_function" and node not in behind and node not in done

    for node in values.gm.graph.nodes:
        if node not in behind or node.op != "call_function":
            continue
        waiting = list(filter(is_missing, inputs[node]))
        while waiting:
            source = waiting[-1]
            more = list(filter(is_missing, inputs[source])) if source not in done else []
            if more:
                waiting += more
                continue
            waiting.pop()
            if source not in done:
                done.add(source)
                yield source, source in forward
        yield node, False


def _ahead(values: ForwardValues, saved: frozenset[Node]) -> list[Node]:
    """Return the nodes of the forward: those that its results and saved values depend on."""
    needed = sources_of((*values.results, *saved))
    return [node for node in values.forward if node in needed]


@dataclass
class _Memory:
    """The places of values while nodes run, one after the other."""

    values: ForwardValues
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
        for source in self.values.inputs[node]:
            if source in self._away:
                self._away.discard(source)
                self._place(source)
            for piece in self._places.get(source, ()):
                self._last[piece] = self._time
        self._place(node)
        inside = self.values.memory.by_name.get(f"{node.name}:inside")
        if inside is not None:  # while it runs
            self._allocate(node, inside.bytes)
        self._time += 1

    def _place(self, node: Node) -> None:
        memory = self.values.memory
        roots = memory.roots.get(node.name, ())
        own = [name for name in roots if name.partition(":")[0] == node.name]
        for name in own:
            self._piece[name] = self._allocate(node, memory.by_name[name].bytes)
        value = self.values.values.get(node)
        is_inlined = not own and node.target is not operator.getitem and value is not None and value.bytes > 0
        if is_inlined and node in self.kept:  # it would not be in memory otherwise
            assert value is not None
            self._places[node] = (self._allocate(node, value.bytes),)
        else:
            self._places[node] = tuple(self._piece[name] for name in roots if name in self._piece)

    def _allocate(self, node: Node, size: int) -> int:
        self._bytes.append(size)
        self._first.append(self._time)
        self._last.append(self._time)
        self._makers[len(self._bytes) - 1] = node
        return len(self._bytes) - 1

    def live(self) -> list[int]:
        """Return the bytes alive at each moment; results of the backward stay."""
        leaving = {
            name for node in self.values.memory.outputs if node for name in self.values.memory.roots.get(node, ())
        }
        staying = {self._piece[name] for name in leaving if name in self._piece}
        changes = [0] * (self._time + 1)
        for piece, size in enumerate(self._bytes):
            is_result = piece in staying and self._makers[piece] not in self.values.part_of
            changes[self._first[piece]] += size
            changes[self._time if is_result else self._last[piece] + 1] -= size
        return list(accumulate(changes[: self._time]))

    def saved(self, border: int) -> list[int]:
        """Return the bytes of each part that outlive the forward, which ends at `border`."""
        found = [0] * len(self.values.parts)
        for piece, size in enumerate(self._bytes):
            if self._first[piece] < border <= self._last[piece]:
                found[self.values.part_of[self._makers[piece]]] += size
        return found


def _parts_behind(values: ForwardValues, steps: list[tuple[Node, bool]]) -> Iterator[int]:
    """Yield the part of each step of the backward, which goes through parts from the last to the first.

    A node before its part, such as one that two blocks share, belongs to the current part.
    """
    numbers = {part.name: number for number, part in enumerate(values.parts) if part.name}
    found: list[int] = []
    current = 0
    gradients = values.gradients
    for node, _ in reversed(steps):
        if node in gradients:
            block = block_of(module_of(node) or "")
            if block is not None:
                current = max(current, numbers.get(".".join(block), current))
        found.append(current)
    found.reverse()
    blocks = (number for number, (node, _) in enumerate(steps) if node in gradients and block_of(module_of(node) or ""))
    named = next(blocks, 0)
    yield from [len(values.parts) - 1] * named
    yield from found[named:]

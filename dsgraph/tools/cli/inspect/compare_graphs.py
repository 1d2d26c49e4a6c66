"""Matching of the nodes of two graphs whose names may have changed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from dsgraph.tools.dumping.order import out_of_order
from dsgraph.tools.dumping.records import NodeRecord


@dataclass(frozen=True)
class Change:
    """A node that is in both graphs and differs: the property that differs, before and after."""

    before: NodeRecord
    after: NodeRecord
    what: tuple[str, ...]


@dataclass(frozen=True)
class GraphDifference:
    """The differences between two graphs.

    Attributes:
        removed: Nodes of the first that are not in the second.
        added: Nodes of the second that are not in the first.
        changed: Nodes in both with another call, other arguments or another result.
        moved: Nodes in both whose order differs: the fewest that explain the change of order.
        same: Number of nodes that differ in their names at most.
    """

    removed: tuple[NodeRecord, ...]
    added: tuple[NodeRecord, ...]
    changed: tuple[Change, ...]
    moved: tuple[NodeRecord, ...]
    same: int

    @property
    def is_empty(self) -> bool:
        """True if the graphs are the same but for names."""
        return not (self.removed or self.added or self.changed or self.moved)


def compare(first: Sequence[NodeRecord], second: Sequence[NodeRecord]) -> GraphDifference:
    """Compare two graphs node by node."""
    matches = match(first, second)
    new_name = {before.name: after.name for before, after in matches}
    changes = [
        Change(before, after, what) for before, after in matches if (what := _differences(before, after, new_name))
    ]
    matched_before = {before.name for before, _ in matches}
    matched_after = {after.name for _, after in matches}
    places = {node.name: place for place, node in enumerate(second)}
    places_before = {node.name: place for place, node in enumerate(first)}
    in_first_order = sorted(matches, key=lambda pair: places_before[pair[0].name])
    out = out_of_order([places[after.name] for _, after in in_first_order])
    return GraphDifference(
        removed=tuple(node for node in first if node.name not in matched_before),
        added=tuple(node for node in second if node.name not in matched_after),
        changed=tuple(changes),
        moved=tuple(in_first_order[index][1] for index in out),
        same=len(matches) - len(changes),
    )


def match(first: Sequence[NodeRecord], second: Sequence[NodeRecord]) -> list[tuple[NodeRecord, NodeRecord]]:
    """Return the pairs of nodes that are each other.

    First those that are computed alike from the inputs on, then those whose results are used alike up to the outputs;
    of the rest those of the same call that read matched nodes, in program order, names deciding between equals.
    """
    pairing = _Pairing()
    for hashes in (_upstream, _downstream):
        pairing.take_equal(pairing.left(first, 0), pairing.left(second, 1), hashes(first), hashes(second))
    readers: dict[str, list[NodeRecord]] = defaultdict(list)
    by_name = {node.name: node for node in second}
    for node in second:
        for name in node.inputs:
            readers[name].append(node)
    for node in pairing.left(first, 0):
        near = [reader for name in node.inputs for reader in readers[pairing.new_name.get(name, "")]]
        near += [by_name[node.name]] if node.name in by_name else []
        candidates = [other for other in near if pairing.is_free(other) and _kind(other) == _kind(node)]
        if candidates:
            pairing.add(node, max(candidates, key=lambda other: pairing.likeness(node, other)))
    return pairing.pairs


class _Pairing:
    def __init__(self) -> None:
        self.pairs: list[tuple[NodeRecord, NodeRecord]] = []
        self.new_name: dict[str, str] = {}
        self._taken: tuple[set[str], set[str]] = (set(), set())

    def add(self, before: NodeRecord, after: NodeRecord) -> None:
        self.pairs.append((before, after))
        self.new_name[before.name] = after.name
        self._taken[0].add(before.name)
        self._taken[1].add(after.name)

    def is_free(self, after: NodeRecord) -> bool:
        return after.name not in self._taken[1]

    def left(self, nodes: Sequence[NodeRecord], side: int) -> list[NodeRecord]:
        return [node for node in nodes if node.name not in self._taken[side]]

    def take_equal(
        self,
        first: Sequence[NodeRecord],
        second: Sequence[NodeRecord],
        hashes_of_first: dict[str, int],
        hashes_of_second: dict[str, int],
    ) -> None:
        """Pair nodes of equal hash: those of one name, then the others in program order."""
        waiting: dict[int, list[NodeRecord]] = defaultdict(list)
        for node in second:
            waiting[hashes_of_second[node.name]].append(node)
        groups: dict[int, list[NodeRecord]] = defaultdict(list)
        for node in first:
            groups[hashes_of_first[node.name]].append(node)
        for key, nodes in groups.items():
            others = {node.name: node for node in waiting.get(key, ())}
            unpaired = []
            for node in nodes:
                if node.name in others:
                    self.add(node, others.pop(node.name))
                else:
                    unpaired.append(node)
            for node, other in zip(unpaired, others.values(), strict=False):
                self.add(node, other)

    def likeness(self, node: NodeRecord, candidate: NodeRecord) -> tuple[int, int, bool]:
        """Return how many inputs are matched, how much of the place in the user's model agrees, whether names agree."""
        inputs = sum(self.new_name.get(name) in candidate.inputs for name in node.inputs)
        place = (node.module == candidate.module) + (node.source == candidate.source)
        return (inputs, place, node.name == candidate.name)


def _kind(node: NodeRecord) -> Hashable:
    """Return what identifies the call of a node. Inputs are told apart by what they are, not by their number."""
    if node.op == "placeholder":
        return (node.op, node.parameter, node.values if not node.parameter else ())
    return (node.op, node.target if node.op != "output" else "")


def _call(node: NodeRecord, new_names: dict[str, str]) -> str:
    """Return its arguments with other names in it."""
    return re.sub(r"%(\w+)", lambda found: "%" + new_names.get(found[1], f"?{found[1]}"), node.args)


def _upstream(nodes: Sequence[NodeRecord]) -> dict[str, int]:
    """Return a hash of how each node is computed from the graph's inputs."""
    hashes: dict[str, int] = {}
    seen: dict[Hashable, int] = defaultdict(int)
    for node in nodes:
        if node.op == "placeholder":
            kind = _kind(node)
            hashes[node.name] = hash((kind, seen[kind]))
            seen[kind] += 1
        else:
            texts = {name: str(hashes.get(name)) for name in node.inputs}
            hashes[node.name] = hash((_kind(node), _call(node, texts), node.values))
    return hashes


def _downstream(nodes: Sequence[NodeRecord]) -> dict[str, int]:
    """Return a hash of what becomes of each node's result, up to the outputs."""
    uses: dict[str, list[Hashable]] = defaultdict(list)
    hashes: dict[str, int] = {}
    for node in reversed(nodes):
        hashes[node.name] = hash((_kind(node), node.values, tuple(uses[node.name])))
        for name in node.inputs:
            others = dict.fromkeys(node.inputs, "other") | {name: "this"}
            uses[name].append((hashes[node.name], _call(node, others) if node.op != "output" else _place(node, name)))
    return hashes


def _place(output: NodeRecord, name: str) -> Hashable:
    """Return which of the outputs a node is."""
    parts = re.findall(r"%(\w+)|None", output.args)
    return tuple(index for index, part in enumerate(parts) if part == name)


def _differences(before: NodeRecord, after: NodeRecord, new_name: dict[str, str]) -> tuple[str, ...]:
    found = []
    if before.op == after.op == "placeholder":
        found += ["parameter"] * (before.parameter != after.parameter)
    else:
        found += ["call"] * (before.target != after.target)
        found += ["arguments"] * (_call(before, new_name) != after.args)
    found += ["result"] * (before.values != after.values)
    found += ["recompute"] * (before.recompute != after.recompute)
    return tuple(found)

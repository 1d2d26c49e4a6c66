"""The memory of a graph: live bytes at every node, as the eager code generator runs it.

Nodes run in program order. A node's results are allocated when it runs, and a piece of memory is freed after the last
use of the last value in it: views, waits and in-place results share their argument's memory. Nothing is run: sizes and
aliases are read off fake tensors and schemas.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.compat import captured_input, storage_id
from dsgraph.passes.ir.coalesced import collective_behind, inputs_of
from dsgraph.passes.ir.collectives import collective_of, is_collective
from dsgraph.passes.ir.graph import aliased_arguments, is_wait

from .fusion import inlined, is_concatenation, writes_over_operands
from .kernel_scratch import oversized_bytes, scratch_bytes
from .pieces import GraphMemory, MemoryKind, Piece
from .sizes import UNKNOWN_SIZE, hint, tensor_bytes


def simulate(
    gm: GraphModule,
    *,
    owned: Collection[str] | None = None,
    roots: Mapping[str, str] = MappingProxyType({}),
    fused: bool = False,
) -> GraphMemory:
    """Return the memory of `gm` as the eager code generator runs it, or, with `fused`, roughly as Inductor does.

    Two properties of kernels are included that the graph does not show: a collective reads its argument until its wait,
    unless it works on a copy; and CPU kernels use scratch memory, see `kernel_scratch`.

    Args:
        gm: A graph of ATen ops with fake values on its nodes.
        owned: Names of inputs that the caller holds: alive all the time. Others are freed after their last use. By
            default those that were inputs of the captured graph, so that tangents and saved values are freed.
        roots: For inputs that are results of another graph, their piece of memory there: inputs in the same piece are
            counted once. For other inputs, fake tensors show it.
        fused: Use the rules of `fusion`: inlined results take no memory, and their operands live until they are read;
            and a result may be written over an operand.

    Returns:
        Bytes; data-dependent sizes count as `UNKNOWN_SIZE`.
    """
    nodes = list(gm.graph.nodes)
    table = _Table(roots, inlined=inlined(nodes) if fused else frozenset(), fused=fused)
    for number, node in enumerate(nodes):
        table.place(node, number)
    if owned is None:
        owned = {node.name for node in nodes if node.op == "placeholder" and captured_input(node) is not None}
    outputs = _outputs(nodes)
    leaving = {name for node in outputs if node is not None for name in table.names(node)}
    held = {name for node in nodes if node.name in owned or node.op == "get_attr" for name in table.names(node)}
    staying = leaving | held
    pieces = []
    ends = _last_uses(nodes, table)
    if fused:
        ends = _written_over(nodes, table, ends, staying)
        table.pieces = _written_into(nodes, table)
    for piece, last in zip(table.pieces, ends, strict=True):
        kind = MemoryKind.OUTPUT if piece.node in leaving and piece.kind is not MemoryKind.INPUT else piece.kind
        last = len(nodes) if piece.node in staying else last
        pieces.append(replace(piece, kind=kind, owned=piece.node in held, last=last))
    return GraphMemory(
        nodes=tuple(node.name for node in nodes),
        live=_live_bytes(pieces, len(nodes)),
        pieces=tuple(pieces),
        roots={node.name: names for node in nodes if (names := table.names(node))},
        outputs=tuple(None if node is None else node.name for node in outputs),
    )


class _Table:
    """The pieces of memory of each value.

    Attributes:
        pieces: All pieces, in the order of allocation; `last` is not known yet.
    """

    def __init__(self, given_roots: Mapping[str, str], *, inlined: Collection[Node], fused: bool) -> None:
        self._fused = fused
        self.pieces: list[Piece] = []
        self._inlined = inlined
        self._given_roots = given_roots
        self._places: dict[Node, list[tuple[str, ...]]] = {}  # a tuple for each of a node's results
        self._names: dict[Node, tuple[str, ...]] = {}
        self._inputs: dict[str | int, str] = {}  # piece of another graph, or storage -> piece

    def names(self, node: Node) -> tuple[str, ...]:
        """Return the pieces of a node's value, in order, each once."""
        return self._names.get(node, ())

    def place(self, node: Node, number: int) -> None:
        """Assign pieces to a node's results. Nodes come in program order."""
        places = self._places_of(node, number)
        inside = scratch_bytes(node, fused=self._fused)
        if inside:
            self.pieces.append(Piece(f"{node.name}:inside", inside, MemoryKind.OTHER, number, number))
        self._places[node] = places
        self._names[node] = tuple(dict.fromkeys(chain(*places)))

    def _places_of(self, node: Node, number: int) -> list[tuple[str, ...]]:
        value = node.meta.get("val")
        results = list(value) if isinstance(value, (tuple, list)) else [value]
        if node.op in ("placeholder", "get_attr"):
            return [self._input(node, value)]
        if node.op == "call_function" and node.target is operator.getitem:
            names = self._item(*node.args)
            is_tuple = isinstance(value, tuple) and len(value) == len(names)  # of results of an op that another runs
            return [(name,) for name in names] if is_tuple else [names]
        if node in self._inlined:
            return [tuple(dict.fromkeys(chain(*map(self.names, node.all_input_nodes))))]
        if node.op == "output":
            return []
        own: dict[int, str] = {}  # results of one op may share memory
        return [
            self.names(source) if source is not None else self._allocate(node, result, number, own)
            for source, result in zip(aliased_arguments(node), results, strict=True)
        ]

    def _input(self, node: Node, value: object) -> tuple[str, ...]:
        if not isinstance(value, torch.Tensor):
            return ()
        key = self._given_roots.get(node.name, _storage(value))
        if key not in self._inputs:
            self._inputs[key] = node.name
            self.pieces.append(Piece(node.name, _storage_bytes(value), MemoryKind.INPUT, first=0, last=0))
        return (self._inputs[key],)

    def _item(self, source: Any, index: Any) -> tuple[str, ...]:
        places = self._places.get(source, [])
        return places[index] if isinstance(index, int) and len(places) > 1 else self.names(source)

    def _allocate(self, node: Node, result: object, number: int, own: dict[int, str]) -> tuple[str, ...]:
        if isinstance(result, (tuple, list)):
            return tuple(name for item in result for name in self._allocate(node, item, number, own))
        if not isinstance(result, torch.Tensor):
            return ()
        key = _storage(result)
        if key not in own:
            own[key] = f"{node.name}:{len(own)}" if own else node.name
            kind = MemoryKind.COMMUNICATION if is_collective(node) else MemoryKind.OTHER
            size = _storage_bytes(result) + oversized_bytes(node, fused=self._fused)
            self.pieces.append(Piece(own[key], size, kind, first=number, last=number))
        return (own[key],)


def _storage(value: torch.Tensor) -> int:
    return storage_id(value) if value.layout is torch.strided else id(value)


def _storage_bytes(value: torch.Tensor) -> int:
    size: Any = value.untyped_storage().nbytes() if value.layout is torch.strided else tensor_bytes(value)
    return hint(size, unknown=UNKNOWN_SIZE)


def _outputs(nodes: Sequence[Node]) -> list[Node | None]:
    returned = nodes[-1].args[0] if nodes and nodes[-1].op == "output" else ()
    values = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [value if isinstance(value, Node) else None for value in values]


def _last_uses(nodes: Sequence[Node], table: _Table) -> list[int]:
    """Return, for each piece, the number of the node after which it can be freed."""
    last = {piece.node: piece.first for piece in table.pieces}
    for number, node in enumerate(nodes):
        if node.op == "placeholder" and not node.users:
            last.update(dict.fromkeys(table.names(node), len(nodes)))  # nothing frees what nothing uses
        for source in node.all_input_nodes:
            for name in table.names(source):
                last[name] = max(last[name], number)
        if is_wait(node):
            for name in _read_until(node, table):
                last[name] = max(last[name], number)
    return [last[piece.node] for piece in table.pieces]


def _read_until(wait: Node, table: _Table) -> list[str]:
    """Return the pieces that the collective which `wait` ends reads until then."""
    started = collective_of(collective_behind(wait))
    if started is None or not started.is_read_until_wait:
        return []
    return [name for source in inputs_of(wait.all_input_nodes[0]) for name in table.names(source)]


def _live_bytes(pieces: Sequence[Piece], count: int) -> tuple[int, ...]:
    changes = [0] * (count + 1)
    for piece in pieces:
        changes[piece.first] += piece.bytes
        changes[min(piece.last + 1, count)] -= piece.bytes
    return tuple(accumulate(changes[:count]))


def _written_over(nodes: Sequence[Node], table: _Table, ends: Sequence[int], staying: Collection[str]) -> list[int]:
    """Return `ends`, with an operand that a kernel overwrites by its result freed before that result."""
    changed = list(ends)
    number_of = {piece.node: number for number, piece in enumerate(table.pieces)}
    for result in table.pieces:
        node = nodes[result.first]
        if result.kind is not MemoryKind.OTHER or not writes_over_operands(node):
            continue
        for name in dict.fromkeys(name for source in node.all_input_nodes for name in table.names(source)):
            number = number_of[name]
            operand = table.pieces[number]
            dies = changed[number] == result.first and name not in staying and operand.kind is MemoryKind.OTHER
            if dies and operand is not result and operand.bytes == result.bytes:
                changed[number] -= 1
                break
    return changed


def _written_into(nodes: Sequence[Node], table: _Table) -> list[Piece]:
    """Return the pieces, with results of a concatenation's loops as parts of its result, allocated with the first."""
    changed = list(table.pieces)
    number_of = {piece.node: number for number, piece in enumerate(table.pieces)}
    for result, piece in enumerate(table.pieces):
        if not is_concatenation(nodes[piece.first]):
            continue
        for source in nodes[piece.first].all_input_nodes:
            for number in (number_of[name] for name in table.names(source)):
                part = changed[number]
                if part.kind is MemoryKind.OTHER and writes_over_operands(nodes[part.first]):
                    changed[number] = replace(part, bytes=0)
                    changed[result] = replace(changed[result], first=min(part.first, changed[result].first))
    return changed

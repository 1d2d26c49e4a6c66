"""Saved values that can leave the device's memory, and the nodes by which the backward needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node, map_arg

from dsgraph.inductor_ext import same_size
from dsgraph.passes.analysis.pieces import GraphMemory
from dsgraph.passes.analysis.sizes import UNKNOWN_SIZE, hint
from dsgraph.passes.core.context import PassContext
from dsgraph.passes.core.graph_pair import GraphPair
from dsgraph.passes.core.notes import parameter_behind
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.graph import KEPT, aliased_arguments, emit, is_returned, mutates_arguments
from dsgraph.passes.ir.save_plan import tier_of
from dsgraph.passes.ir.size_nodes import SizeNodes


@dataclass(frozen=True)
class StoredValue:
    """A piece of the forward's memory that leaves the device.

    Attributes:
        base: The node of the forward whose value fills the piece.
        views: For each saved value in it, the backward's input and the steps from the base to it, in order.
        forward_place: The forward's last node that uses the piece.
        backward_place: The backward's first node that uses it.
        size: Bytes.
        tier: "host" or "disk"; or the argument of `find_stored`.
    """

    base: Node
    views: tuple[tuple[Node, Node, tuple[Node, ...]], ...]
    forward_place: Node
    backward_place: Node
    size: int
    tier: str


def find_stored(
    pair: GraphPair, ctx: PassContext, sizes: SizeNodes, *, tier: str | None, least_bytes: int
) -> tuple[list[StoredValue], list[str]]:
    """Return the pieces to offload, in the order in which the backward needs them, and why others stay.

    Args:
        pair: The graphs.
        ctx: Their facts.
        sizes: The sizes that the backward knows.
        tier: The tier of every piece of `least_bytes` that is no parameter and no input; None for only those of the
            plan.
        least_bytes: Smaller pieces stay, unless the plan names them.
    """
    ahead, _ = pair.parts(ctx)
    memory = ctx.analyses.memory(pair.forward)
    number_of = {node: number for number, node in enumerate(pair.backward.graph.nodes)}
    uses = _Uses(pair, memory)
    found, notes = list[StoredValue](), list[str]()
    for piece, saved in _by_piece(pair, memory).items():
        planned = next((chosen for value, _ in saved if (chosen := tier_of(value)) is not None), None)
        size = memory.bytes_of([piece])
        where = planned or (tier if size >= least_bytes and not _is_parameter(saved, ahead[1]) else None)
        if where is None or not any(theirs.users for _, theirs in saved):
            continue
        reason, base = _reason_to_stay(uses, memory, piece, saved, sizes)
        if base is None or reason:
            if planned or saved[0][0].op != "placeholder":
                notes.append(f"{saved[0][0].name} is not offloaded, {size} bytes: {reason}")
            continue
        users = [user for _, theirs in saved for user in theirs.users]
        first = min(users, key=number_of.__getitem__)
        views = tuple((value, theirs, _steps(base, value, sizes) or ()) for value, theirs in saved)
        found.append(StoredValue(base, views, uses.last[piece], first, size, where))
    return sorted(found, key=lambda item: number_of[item.backward_place]), notes


def make_views(item: StoredValue, base: Node, sizes: SizeNodes) -> None:
    """Let the backward read a piece, and its views, from `base`, its own node for the piece's base."""
    made: dict[Node, Node] = {item.base: base}
    for ours, theirs, steps in item.views:
        for step in steps:
            if step not in made:
                made[step] = _repeat(item.backward_place, step, made, sizes)
        theirs.replace_all_uses_with(made[ours])


def _repeat(before: Node, step: Node, made: dict[Node, Node], sizes: SizeNodes) -> Node:
    assert callable(step.target), f"{step.name} is no view"
    take = lambda node: made[node] if node in made else sizes.node(node.meta["val"])  # noqa: E731
    args, kwargs = map_arg((step.args, step.kwargs), take)
    return emit(before, step.target, *args, **kwargs)


def drop_stored(pair: GraphPair, found: Sequence[StoredValue]) -> None:
    """Stop saving pieces that the backward makes from something else."""
    pair.drop_all([ours for item in found for ours, _, _ in item.views])


class _Uses:
    """The uses of each piece of the forward's memory.

    Attributes:
        inside: Piece -> the nodes whose values are in it, in program order.
        last: Piece -> the last node that reads it or is in it.
        returned: The pieces that the model returns.
    """

    def __init__(self, pair: GraphPair, memory: GraphMemory) -> None:
        self.inside: dict[str, list[Node]] = {}
        self.last: dict[str, Node] = {}
        for node in pair.forward.graph.nodes:
            for piece in memory.roots.get(node.name, ()):
                self.inside.setdefault(piece, []).append(node)
            if node.op != "output":
                used = [piece for value in (node, *node.all_input_nodes) for piece in memory.roots.get(value.name, ())]
                self.last.update(dict.fromkeys(used, node))
        user_outputs = memory.outputs[: pair.user_outputs]
        self.returned = {piece for name in user_outputs if name for piece in memory.roots.get(name, ())}


def _by_piece(pair: GraphPair, memory: GraphMemory) -> dict[str, list[tuple[Node, Node]]]:
    """Return the saved tensors in each piece, as nodes of the forward and inputs of the backward."""
    found: dict[str, list[tuple[Node, Node]]] = {}
    for ours, theirs in pair.crossing():
        if isinstance(ours.meta.get("val"), torch.Tensor):
            for piece in memory.roots.get(ours.name, ())[:1]:
                found.setdefault(piece, []).append((ours, theirs))
    return found


def _is_parameter(saved: list[tuple[Node, Node]], ctx: PassContext) -> bool:
    return any(value.meta.get(KEPT) or parameter_behind(value, ctx) is not None for value, _ in saved)


def _reason_to_stay(
    uses: _Uses, memory: GraphMemory, piece: str, saved: list[tuple[Node, Node]], sizes: SizeNodes
) -> tuple[str, Node | None]:
    """Return why a piece cannot leave, or the node whose value fills it."""
    inside = uses.inside[piece]
    if inside[0].op == "placeholder":
        return "it is an input of the graph", None
    if piece in uses.returned:
        return "the model returns it", None
    base = next((node for node in inside if _fills(node, piece, memory)), None)
    if base is None:
        return "no tensor of the forward owns its memory", None
    if not all(map(sizes.knows, (*base.meta["val"].shape, *base.meta["val"].stride()))):
        return "the backward does not know its size", None
    if any(len(memory.roots[value.name]) > 1 or _steps(base, value, sizes) is None for value, _ in saved):
        return "the backward cannot rebuild it from the tensor that owns its memory", None
    users = [user for node in inside for user in node.users] + [user for _, theirs in saved for user in theirs.users]
    if any(map(mutates_arguments, users)):
        return "a node writes to it", None
    if any(is_returned(theirs) for _, theirs in saved):
        return "the backward returns it", None
    return "", base


def _fills(node: Node, piece: str, memory: GraphMemory) -> bool:
    """Return whether a node's value fills the piece, without gaps or overlaps."""
    value = node.meta.get("val")
    if is_collective(node) or memory.roots[node.name] != (piece,) or not isinstance(value, torch.Tensor):
        return False
    if value.layout is not torch.strided or not _is_dense(value):
        return False
    return hint(value.numel(), unknown=UNKNOWN_SIZE) * value.element_size() == memory.bytes_of([piece])


def _is_dense(value: torch.Tensor) -> bool:
    expected: int | torch.SymInt = 1
    dimensions = zip(value.stride(), value.shape, strict=True)
    for stride, size in sorted(dimensions, key=lambda item: tuple(hint(n, unknown=UNKNOWN_SIZE) for n in item)):
        if not same_size(size, 1):
            if not same_size(stride, expected):
                return False
            expected = expected * size
    return True


def _steps(base: Node, value: Node, sizes: SizeNodes) -> tuple[Node, ...] | None:
    """Return the views that lead from a piece's base to a value in it; None if a step needs anything else."""
    steps = list[Node]()
    while value is not base:
        inputs = value.all_input_nodes
        given = [source for source in inputs if isinstance(source.meta.get("val"), torch.SymInt)]
        sources = [source for source in inputs if source not in given]
        aliased = {source for source in aliased_arguments(value) if source is not None}
        if len(sources) != 1 or aliased != {sources[0]} or is_collective(value):
            return None
        if not all(sizes.knows(source.meta["val"]) for source in given):
            return None
        steps.append(value)
        value = sources[0]
    return tuple(reversed(steps))

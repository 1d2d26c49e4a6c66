"""Rules for gradients: each is summed exactly once over each of its groups.

A *history* is the list of groups over which a value was summed since an op that mixes values (such as a matrix
product). It is followed through views, casts, pointwise ops, cats, slices and waits. A value has several histories if
it combines values with different ones. Only values that depend on a tangent are followed: gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.compat import is_tangent
from dsgraph.passes.core.context import PassContext
from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.coalesced import inputs_of, is_result
from dsgraph.passes.ir.collectives import Collective, Role, collective_of
from dsgraph.passes.ir.graph import bound_arguments
from dsgraph.passes.ir.op_traits import traits

aten = torch.ops.aten

History = tuple[str, ...]
Histories = frozenset[History]
_EMPTY: Histories = frozenset({()})
_NOT_FOLLOWED: Histories = frozenset()

_EXCHANGED = "exchanged over "

_WORKER_ERROR = 2  # where it stands among the results of `reduce_compressed`

_SPLITS = frozenset({aten.split_with_sizes.default, aten.split.Tensor, aten.split.sizes})

# Over slices: ops before `LowerForwardSlices` and `LowerBackwardSlices` that sum nothing.
_own = torch.ops.dsgraph
_PASS_SUMS_ON = frozenset({_own.gather_slices.default, _own.gather_entered.default, _own.enter_slices.default})
_SUM_SLICES = frozenset({_own.sum_slices.default, _own.scatter_sum.default})


@dataclass(frozen=True)
class _Value:
    """The histories of a value; of each part along its first dimension, if it was concatenated."""

    histories: Histories
    parts: tuple[tuple[int, Histories], ...] = ()


_NEW = _Value(_EMPTY)


def observe(gm: GraphModule, outputs: Iterable[object], ctx: PassContext) -> tuple[Histories, ...]:
    """Return the histories of each of a graph's outputs; empty for those that are no gradients."""
    sizes = {axis.group: axis.size for axis in ctx.axes}
    values: dict[Node, _Value] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if is_tangent(node):
                values[node] = _NEW
        elif node.op == "call_function":
            # Several tensors that a collective reduces at once have different histories.
            given = inputs_of(node) if is_result(node) else node.all_input_nodes
            sources = [values[source] for source in given if source in values]
            if sources:
                call = node.all_input_nodes[0] if is_result(node) else node
                values[node] = _follow(call, sources, values, sizes)
    found = (values.get(value) if isinstance(value, Node) else None for value in outputs)
    return tuple(_NOT_FOLLOWED if value is None else value.histories for value in found)


def check(before: tuple[Histories, ...], after: tuple[Histories, ...], who: str, ctx: PassContext) -> None:
    """Compare the histories of a graph's outputs before and after a pass.

    Raises:
        PassError: An output is summed over other groups than before.
    """
    for index, (was, now) in enumerate(zip(before, after, strict=True)):
        if was != now:
            whose = f"the gradient of {ctx.gradients[index]}" if index in ctx.gradients else "a gradient"
            raise PassError(
                f"{who} changed what output {index}, {whose}, is summed over from {_describe(was)} to "
                f"{_describe(now)}; a gradient is reduced exactly once over each of its groups"
            )


def _describe(histories: Histories) -> str:
    described = []
    for history in sorted(histories):
        times = {group: history.count(group) for group in history}
        groups = (f"{group}" if n == 1 else f"{group} {n} times" for group, n in times.items())
        described.append(" and ".join(groups) or "nothing")
    return "; ".join(described) or "not at all a gradient"


def _follow(node: Node, sources: list[_Value], values: Mapping[Node, _Value], sizes: Mapping[str, int]) -> _Value:
    target: Any = node.target
    if target is torch.ops.dsgraph.reduce_compressed.default:
        return sources[0]
    if target is torch.ops.dsgraph.reduce_grad.default:
        call = bound_arguments(node)
        groups = [group for group in (call["group"], *call["outer_groups"]) if group]
        return _summed(sources[0], [_event(group, "sum") for group in groups if sizes.get(group) != 1])
    if target is operator.getitem and node.all_input_nodes[0].target is torch.ops.dsgraph.reduce_compressed.default:
        return _of_compressed(node, sources[0], sizes)
    if target in _SUM_SLICES:
        group = bound_arguments(node)["group"]
        return _summed(sources[0], [_event(group, "sum")] if sizes.get(group) != 1 else [])
    if target in _PASS_SUMS_ON:
        return _Value(sources[0].histories)
    collective = collective_of(node)
    if collective is not None:
        return _communicated(node, collective, sources, sizes)
    if target is torch.ops.dsgraph.compress_average.default:
        return _added_up(sources[0])
    if not traits(node).carries_sums:
        return _NEW
    packet = getattr(target, "overloadpacket", None)
    if packet is aten.sum:
        return _added_up(sources[0])
    if packet is aten.cat:
        return _joined(node, sources, values)
    if len(sources) == 1:
        source = sources[0]
        return source if not source.parts else _part(node, source)
    union = _union(source.histories for source in sources)
    return _NEW if union == _EMPTY else _Value(union)


def _of_compressed(result: Node, gradient: _Value, sizes: Mapping[str, int]) -> _Value:
    """Return a result of `reduce_compressed`: all but the rank's own error are sums over all ranks."""
    group = bound_arguments(result.all_input_nodes[0])["group"]
    is_of_all = group and sizes.get(group) != 1 and result.args[1] != _WORKER_ERROR
    return _summed(gradient, [_event(group, "sum")] if is_of_all else [])


def _communicated(node: Node, kind: Collective, sources: list[_Value], sizes: Mapping[str, int]) -> _Value:
    call = bound_arguments(node)
    source = sources[0] if len(sources) == 1 else _Value(_union(source.histories for source in sources))
    if sizes.get(call["group_name"]) == 1:
        return source
    if kind.reduces:
        changed = _summed(source, [_event(call["group_name"], call["reduce_op"])])
        return changed if _rows(node) == sum(size for size, _ in source.parts) else _Value(changed.histories)
    if kind.role is Role.EXCHANGE:
        return _Value(_summed(source, [f"{_EXCHANGED}group {call['group_name']!r}"]).histories)
    return _Value(source.histories)


def _event(group: str, reduce_op: str) -> str:
    return f"group {group!r}" if reduce_op.lower() in ("sum", "avg") else f"group {group!r} ({reduce_op})"


def _summed(source: _Value, events: Iterable[str]) -> _Value:
    events = tuple(events)

    def extend(histories: Histories) -> Histories:
        return frozenset(tuple(sorted((*history, *events)))[:8] for history in histories)

    return _Value(extend(source.histories), tuple((size, extend(part)) for size, part in source.parts))


def _added_up(source: _Value) -> _Value:
    """Return a sum on this rank: values that every rank has sent are reduced once they are added up."""
    if source is _NEW:
        return source
    return _Value(
        frozenset(tuple(sorted(event.removeprefix(_EXCHANGED) for event in history)) for history in source.histories)
    )


def _joined(node: Node, sources: list[_Value], values: Mapping[Node, _Value]) -> _Value:
    union = _union(source.histories for source in sources)
    call = bound_arguments(node)
    if len(union) == 1 or call["dim"] != 0:
        return _Value(union)
    parts = []
    for piece in call["tensors"]:
        rows = _rows(piece)
        if rows is None:
            return _Value(union)
        parts.append((rows, values[piece].histories if piece in values else _EMPTY))
    return _Value(union, tuple(parts))


def _part(node: Node, source: _Value) -> _Value:
    """Return the parts after an op with one input: they are cut, stay, or are no longer distinguished."""
    target = node.target
    if target is aten.slice.Tensor:
        call = bound_arguments(node)
        start, end = call["start"] or 0, call["end"]
        total = sum(size for size, _ in source.parts)
        if call["dim"] == 0 and call["step"] == 1 and isinstance(start, int) and isinstance(end, (int, type(None))):
            return _cut(source, start if start >= 0 else start + total, total if end is None else min(end, total))
    if target in _SPLITS:
        return source  # `getitem` cuts
    argument = node.all_input_nodes[0]
    if argument.op == "call_function" and argument.target in _SPLITS:
        sizes = [_rows(value) for value in _items(argument)]
        index = node.args[1] if len(node.args) > 1 else None
        if isinstance(index, int) and all(size is not None for size in sizes):
            known = [size or 0 for size in sizes]
            return _cut(source, sum(known[:index]), sum(known[: index + 1]))
    stays = _rows(node) == sum(size for size, _ in source.parts)
    return source if stays else _Value(source.histories)


def _cut(source: _Value, start: int, end: int) -> _Value:
    kept, position = [], 0
    for size, histories in source.parts:
        overlap = min(end, position + size) - max(start, position)
        if overlap > 0:
            kept.append((overlap, histories))
        position += size
    union = _union(histories for _, histories in kept) or source.histories
    return _Value(union, tuple(kept) if len(union) > 1 else ())


def _rows(value: object) -> int | None:
    fake = value.meta.get("val") if isinstance(value, Node) else value
    if isinstance(fake, torch.Tensor) and fake.dim() and isinstance(fake.shape[0], int):
        return int(fake.shape[0])
    return None


def _items(node: Node) -> list[object]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (list, tuple)) else [None]


def _union(sets: Iterable[Histories]) -> Histories:
    result: Histories = _NOT_FOLLOWED
    for one in sets:
        if one is not result:
            result = result | one if result else one
    return result if len(result) <= 16 else frozenset({("many groups",)})

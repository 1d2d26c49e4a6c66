"""Backwards of compiled graphs that were given accumulated gradients: which of those they may add, and have added."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsgraph.compat.autograd import accumulates, keeping_version
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import PartitionState

from .gradient_placeholder import GradState


def watch_sums(compiled: Callable[..., Any], numbers: Sequence[int]) -> Callable[..., Any]:
    """Return `compiled` with a watch on its backwards, which add accumulated gradients.

    Args:
        compiled: A compiled graph.
        numbers: Which of its inputs are sums that its markers add.
    """
    if not numbers:
        return compiled

    def run(*args: Any) -> Any:
        before = {arg.grad_fn for arg in args if isinstance(arg, Tensor)}
        outputs = compiled(*args)
        if torch.is_grad_enabled():
            _watch_backward(outputs, [args[number] for number in numbers], before)
        return outputs

    return run


@dataclass(frozen=True)
class _Sum:
    """An accumulated gradient that a graph was given. Keeping the graph's outputs does not keep the sum alive."""

    total: weakref.ref[Tensor]
    entry: weakref.ref[ParameterState]

    def current(self) -> tuple[Tensor, ParameterState] | None:
        """Return the sum and its parameter; None if it belongs to an earlier step, because it is empty then."""
        total, entry = self.total(), self.entry()
        if total is None or entry is None or entry.accumulated_grad is not total:
            return None
        return total, entry


def _watch_backward(outputs: Sequence[Any], totals: Sequence[Tensor], before: set[Any]) -> None:
    sums: dict[int, _Sum] = {}
    for total in totals:
        owner: tuple[ParameterState, PartitionState] = total.dsgraph_sum_of  # type: ignore[attr-defined]
        entry, state = owner
        state.sums_were_read = True
        sums[id(entry.param)] = _Sum(weakref.ref(total), weakref.ref(entry))
    for node in _nodes_of(outputs, before):
        slots = {
            slot: sums[id(leaf.variable)]
            for slot, (leaf, _) in enumerate(node.next_functions)
            if id(getattr(leaf, "variable", None)) in sums
        }
        if slots:
            _watch_node(node, slots)


def _nodes_of(outputs: Sequence[Any], before: set[Any]) -> Iterator[Any]:
    """Yield the autograd nodes of one call, from its outputs to the nodes that existed before it."""
    frontier: list[Any] = [out.grad_fn for out in outputs if isinstance(out, Tensor)]
    seen = {None, *before}
    while frontier:
        node = frontier.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        frontier += [following for following, _ in node.next_functions]


def _watch_node(node: Any, slots: dict[int, _Sum]) -> None:
    def before_backward(_: Any) -> None:
        for slot, known in slots.items():
            now = known.current()
            if now is None:
                continue
            _, entry = now
            restore_sum(entry)
            drop_if_zeroed(entry)
            if entry.is_summed and not accumulates(node.next_functions[slot][0]):
                withhold_sum(entry)

    def after_backward(gradients: Sequence[Tensor | None], _: Any) -> None:
        for slot, known in slots.items():
            now = known.current()
            if now is None:
                continue
            total, entry = now
            if gradients[slot] is not None and entry.withheld is None:
                empty_sum(total)
                entry.is_summed = False
            restore_sum(entry)

    node.register_prehook(before_backward)
    node.register_hook(after_backward)


def empty_sum(total: Tensor) -> None:
    """Set an accumulated gradient to zero after its reduction; graphs that still contain it add nothing."""
    with torch.no_grad(), keeping_version((total,)):
        total.zero_()


def drop_if_zeroed(entry: ParameterState) -> None:
    """Drop a sum if `zero_grad` was called after the last addition, as it drops a gradient in one process."""
    if entry.placeholder is None or entry.accumulated_grad is None:
        return
    state_of_grad = entry.placeholder.look(entry.param)
    if state_of_grad is GradState.UNTOUCHED:
        return
    empty_sum(entry.accumulated_grad)
    if state_of_grad is GradState.ZEROS:  # which count as a gradient
        entry.placeholder = entry.placeholder.renew(entry.param, entry.name)
    else:
        entry.placeholder, entry.is_summed = None, False


def withhold_sum(entry: ParameterState) -> None:
    """Set a sum to zero until `restore_sum`, for a backward that must not add it."""
    assert entry.accumulated_grad is not None
    entry.withheld = entry.accumulated_grad.clone()
    empty_sum(entry.accumulated_grad)


def restore_sum(entry: ParameterState) -> None:
    """Restore a sum that was withheld, also if the backward failed."""
    total, value = entry.accumulated_grad, entry.withheld
    entry.withheld = None
    if total is not None and value is not None:
        with torch.no_grad(), keeping_version((total,)):
            total.copy_(value)

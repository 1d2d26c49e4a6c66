"""Compiled graphs of the last micro-batch of a step: each parameter's local sum is reduced with its gradient, once.

While a step with local sums waits for its last backward, captured markers read the sum of their parameter
(`seam.property_for`), and do nothing with it: another compiler than this backend would not say when it was added. The
backend has the markers add it (`add_sums`) and watches the backwards of the compiled graph (`watch_sums`). When one
has put a parameter's gradient, and so the sum, on its way to `.grad`, the sum is emptied: further graphs that read the
parameter add zeros. A backward whose gradient goes elsewhere (`torch.autograd.grad`, `backward(inputs=...)`) finds
zeros. What no graph has added is reduced at the end of the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph import compat
from dsgraph.passes.compat import is_to_local
from dsgraph.passes.ir.graph import all_graph_modules, is_gather_marker, placeholders

from .local_gradients import empty_sum, restore_sum, withhold_sum
from .state import ParameterState, PartitionState

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def add_sums(gm: GraphModule, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Has the markers of a captured graph add the sums that they read.

    If such a graph gives a parameter any gradient, the sum is in it: so only markers that are all that reads their
    parameter, in the graph itself or in checkpoint regions, which run whatever the data are, do so.

    Args:
        gm: The captured graph, as Dynamo wrote it.
        inputs: Its inputs.

    Returns:
        Which inputs are the sums.
    """
    adding: set[Node] = set()
    parameters: set[int] = set()
    for node, value in zip(placeholders(gm), inputs, strict=True):
        markers = _readers(node)
        if markers and all(map(_reads_sum, markers)):
            adding.update(markers)
            parameters.add(id(value))
    for module in all_graph_modules(gm):
        for node in filter(is_gather_marker, module.graph.nodes):
            if node in adding:
                node.kwargs = {**node.kwargs, "adds_sum": True}
        module.recompile()
    sums = ((number, getattr(value, "dsgraph_sum_of", None)) for number, value in enumerate(inputs))
    return tuple(number for number, of in sums if of is not None and id(of[0].param) in parameters)


def _readers(parameter: Node) -> list[Node]:
    """The markers that read a parameter; none if anything else does, or something of which it is not known."""
    found: list[Node] = []
    for user in parameter.users:
        if is_to_local(user):
            markers = list(user.users)
        elif user.target is _CHECKPOINT:
            markers = [marker for inner in _in_region(user, parameter) for marker in _readers(inner) or [user]]
        else:
            return []
        if not all(map(is_gather_marker, markers)):
            return []
        found += markers
    return found


def _in_region(call: Node, operand: Node) -> Iterator[Node]:
    """What a checkpoint region calls one of its operands."""
    body, *operands = call.args
    assert isinstance(body, Node) and call.graph.owning_module is not None
    region = call.graph.owning_module.get_submodule(str(body.target))
    assert isinstance(region, GraphModule)
    for argument, inner in zip(operands, placeholders(region), strict=True):
        if argument is operand:
            yield inner


def _reads_sum(marker: Node) -> bool:
    return len(marker.args) > 3 and marker.args[3] is not None


def watch_sums(compiled: Callable[..., Any], numbers: Sequence[int]) -> Callable[..., Any]:
    """`compiled`, with an eye on its backwards, which add local sums.

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
    """A local sum that a graph was given. Whoever keeps the graph's outputs does not keep the sum."""

    total: weakref.ref[Tensor]
    entry: weakref.ref[ParameterState]

    def current(self) -> tuple[Tensor, ParameterState] | None:
        """The sum and its parameter; None when it is of an earlier step: then it is empty."""
        total, entry = self.total(), self.entry()
        if total is None or entry is None or entry.local_sum is not total:
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
    """The autograd nodes of one call, from its outputs to what was there before."""
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
            if entry.is_summed and not compat.accumulates(node.next_functions[slot][0]):
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

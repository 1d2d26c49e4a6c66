"""Rewriting of a captured graph that computes with slices, call by call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dsgraph.passes.kernels.matching import writes

from .example_values import evaluate
from .slice_walk import Sliced
from .slice_writes import memory_of
from .slices import Outcome, Refusal, Slice, name_of

_own = torch.ops.dsgraph
_NARROW = (torch.bfloat16, torch.float16)


@dataclass
class Rewriting:
    """A graph that is rewritten, from its inputs on."""

    gm: GraphModule
    known: Sliced
    group: str
    changed: int = 0
    notes: list[str] = field(default_factory=list)
    _local: dict[Node, Node] = field(default_factory=dict)
    _made: dict[tuple[Node, Any], Node] = field(default_factory=dict)
    _taken_from: set[Node] = field(default_factory=set)
    _touched: set[Node] = field(default_factory=set)

    def visit(self, node: Node) -> None:
        """Rewrite one call."""
        if writes(node):
            self._forget(node)
        if name_of(node) == "_set_grad_enabled":  # what was made without gradients has none
            self._made.clear()
        if self.known.slice_of(node) is not None:  # a marker: the slice itself replaces it
            self._local[node] = node.args[0]  # type: ignore[assignment]
            return
        outcome = self.known.follow(node)
        if isinstance(outcome, Outcome):
            self._slice(node, outcome)
            self.changed += 1
            return
        for operand in self.known.operands(node):
            if isinstance(outcome, Refusal) or node.op == "output":
                reason = outcome.reason if isinstance(outcome, Refusal) else "the model returns it"
                self.notes.append(f"{operand.name} is gathered for {name_of(node)}: {reason}")
            node.replace_input_with(operand, self._gathered(operand, node))

    @property
    def own(self) -> frozenset[Node]:
        """The nodes whose values are this rank's slices, of the rewritten graph."""
        return frozenset((*self._local.values(), *self._taken_from))

    def _forget(self, writer: Node) -> None:
        """Forget what was made of values before a call writes to their memory."""
        written = {memory_of(operand) for operand in writer.all_input_nodes}
        self._made = {key: made for key, made in self._made.items() if memory_of(key[0]) not in written}

    def _slice(self, node: Node, outcome: Outcome) -> None:
        """Make a call work on slices."""
        is_sliced = outcome.out is not None or outcome.is_partial
        for operand in node.all_input_nodes:
            if self.known.slice_of(operand) is not None:
                continue
            if operand in outcome.takes:
                self._made.setdefault(
                    (operand, outcome.takes[operand]), self._taken(operand, outcome.takes[operand], node)
                )
            elif is_sliced and operand is not outcome.added and _has_gradient(operand):
                self._entered(operand, node)
        if outcome.draws:
            self._draw(node)
            return
        args = node.args if outcome.args is None else outcome.args
        kwargs = node.kwargs if outcome.kwargs is None else outcome.kwargs
        read = lambda operand: self._read(operand, outcome)  # noqa: E731
        node.args, node.kwargs = map_arg(args, read), map_arg(dict(kwargs), read)
        if outcome.added is not None and name_of(node) == "addmm":
            node.target = torch.mm
        if outcome.target is not None:
            node.op, node.target, node.args = "call_function", outcome.target, (*node.args, self.group)
        self._touched.add(node)
        if outcome.is_partial:
            self._sum(node, outcome, narrow=self._widened(node))
        elif outcome.out is not None:
            self._local[node] = node

    def _read(self, operand: Node, outcome: Outcome) -> Node:
        if operand in outcome.takes:
            return self._made[operand, outcome.takes[operand]]
        return self._local.get(operand) or self._made.get((operand, "enter")) or operand

    def _widened(self, node: Node) -> torch.dtype | None:
        """Widen a 16-bit product without gradients to 32 bits; return its dtype, to which the sum is rounded once."""
        # Rounding before the sum as well would give another result than one process.
        value = node.meta.get("example_value")
        if not isinstance(value, Tensor) or value.requires_grad or value.dtype not in _NARROW:
            return None
        if "grouped_mm" in str(node.target):  # torch has it for 16 bits alone
            return None

        def wide(operand: Node) -> Node:
            is_narrow = getattr(operand.meta.get("example_value"), "dtype", None) in _NARROW
            return self._emit(node, torch.Tensor.float, operand) if is_narrow else operand

        node.args, node.kwargs = map_arg(node.args, wide), map_arg(node.kwargs, wide)
        return value.dtype

    def _sum(self, node: Node, outcome: Outcome, *, narrow: torch.dtype | None) -> None:
        users = list(node.users)
        behind: list[tuple[Any, tuple[Any, ...]]] = [(_own.sum_slices.default, (self.group,))]
        if outcome.added is not None:
            behind.append((torch.add, (self._whole(outcome.added),)))
        if narrow is not None:
            behind.append((torch.Tensor.to, (narrow,)))
        last = node
        for target, rest in behind:
            with self.gm.graph.inserting_after(last):
                last = self.gm.graph.call_function(target, (last, *rest))
            last.meta.update(node.meta)
            self._touched.add(last)
        for user in users:
            user.replace_input_with(node, last)

    def _draw(self, node: Node) -> None:
        """Draw the numbers of dropout for the full value, of which this rank keeps its slice."""
        held, operand = self.known.slice_of(node), node.args[0]
        assert isinstance(operand, Node)
        rest = {"p": node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5), "training": True}
        value = node.meta["example_value"]
        ones = self._emit(node, torch.ones, tuple(value.shape), dtype=value.dtype, device=value.device)
        drawn = self._emit(node, F.dropout, ones, **rest)
        own = self._emit(node, _own.own_slice.default, drawn, held.dim, held.parts, self.known.ranks, self.group)
        node.op, node.target, node.args, node.kwargs = "call_function", torch.mul, (self._local[operand], own), {}
        self._touched.add(node)
        self._local[node] = node

    def _entered(self, operand: Node, before: Node) -> Node:
        key = (operand, "enter")
        if key not in self._made:
            self._made[key] = self._emit(before, _own.enter_slices.default, operand, self.group)
        return self._made[key]

    def _taken(self, operand: Node, held: Slice, before: Node) -> Node:
        if (operand, held) in self._made:
            return self._made[operand, held]
        taken = self._emit(before, _own.own_slice.default, operand, held.dim, held.parts, self.known.ranks, self.group)
        self._taken_from.add(taken)
        return taken

    def _whole(self, operand: Node) -> Node:
        return operand

    def _gathered(self, operand: Node, before: Node) -> Node:
        """Return the full value of a sliced operand; for a parameter, its marker."""
        if operand.target in (_own.gather_slices, _own.gather_slices.default):
            return operand
        held, key = self.known.slice_of(operand), (operand, "gather")
        if key not in self._made:
            rest = (held.dim, held.parts, self.known.ranks, self.group)
            self._made[key] = self._emit(before, _own.gather_slices.default, self._local[operand], *rest)
        return self._made[key]

    def _emit(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.gm.graph.inserting_before(before):
            node = self.gm.graph.call_function(target, args, kwargs)
        node.meta.update({key: value for key, value in before.meta.items() if key not in ("example_value", "val")})
        self._touched.add(node)
        return node

    def refresh_values(self) -> None:
        """Recompute the fake values of changed nodes, in the order of the graph."""
        stale = set(self._touched)
        for node in self.gm.graph.nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            if node in stale or any(operand in stale for operand in node.all_input_nodes):
                stale.add(node)
                node.meta["example_value"] = evaluate(node)


def _has_gradient(operand: Node) -> bool:
    value = operand.meta.get("example_value")
    return isinstance(value, Tensor) and value.requires_grad

"""Propagation of slices through a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.passes.ir.graph import all_graph_modules, find_calls

from .slice_rules import FEW_BITS, Rule, outcome_of
from .slices import Outcome, Refusal, Slice, name_of

# Functions that communicate slices: markers, and what `SliceTensors` writes.
_COMMUNICATING = frozenset(
    {
        *("gather_slices", "sum_slices", "enter_slices", "gather_entered", "scatter_sum"),
        *("sliced_embedding", "sliced_cross_entropy", *FEW_BITS),
    }
)


@dataclass
class Sliced:
    """The slices of a graph, as far as they have been followed.

    Attributes:
        ranks: Number of ranks.
        rule: Returns the outcome of a call with sliced operands.
        slices: Node -> the slice of its value.
        origins: Node -> names of the parameters from which its slices come.
    """

    ranks: int
    rule: Rule = outcome_of
    slices: dict[Node, Any] = field(default_factory=dict)
    origins: dict[Node, frozenset[str]] = field(default_factory=dict)

    def slice_of(self, node: object) -> Any:
        """Return a `Slice`, None for a replicated value, a tuple for several values."""
        return self.slices.get(node) if isinstance(node, Node) else None

    def shape_of(self, node: object) -> Any:
        """Return the full shape; None if it is no tensor, a tuple of shapes for several values."""
        value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None
        if isinstance(value, (tuple, list)):
            return tuple(tuple(each.shape) for each in value if isinstance(each, Tensor))
        return tuple(value.shape) if isinstance(value, Tensor) else None

    def hold(self, node: Node, held: Any, origins: frozenset[str]) -> None:
        """Note the slice of a value."""
        self.slices[node] = held
        self.origins[node] = origins

    def operands(self, node: Node) -> list[Node]:
        """Return the sliced operands of a node."""
        return [operand for operand in node.all_input_nodes if self.slices.get(operand) is not None]

    def follow(self, node: Node) -> Outcome | Refusal | None:
        """Return the outcome of a node, and note it; None if no operand is sliced, nor the node's weight."""
        operands = self.operands(node)
        if not (operands or name_of(node) in FEW_BITS) or node.op not in ("call_function", "call_method"):
            return None
        outcome = self.rule(node, self)
        if isinstance(outcome, Outcome) and outcome.out is not None:
            self.hold(node, outcome.out, frozenset().union(*(self.origins[operand] for operand in operands)))
        return outcome


def marked_slices(gm: GraphModule) -> Iterator[tuple[Node, Slice, int, str]]:
    """Yield the sliced parameters that a graph reads: marker, slice, number of ranks, group."""
    marker = torch.ops.dsgraph.gather_slices  # Dynamo captures what was called: the op, or its overload
    for node in [*find_calls(gm, marker), *find_calls(gm, marker.default)]:
        rest: Any = node.args[1:]
        dim, parts, ranks, group = rest
        yield node, Slice(dim, parts), ranks, group


def slice_communication(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes that sum or gather slices, or will do so once `SliceTensors` has run."""
    for node in (node for module in all_graph_modules(gm) for node in module.graph.nodes):
        if node.op == "call_function" and name_of(node).removesuffix(".default") in _COMMUNICATING:
            yield node


def communicates_slices(gm: GraphModule) -> bool:
    """Return True if a graph sums or gathers slices, or will do so once `SliceTensors` has run."""
    return any(True for _ in slice_communication(gm))


def sharing_ranks(gm: GraphModule) -> tuple[int, str] | None:
    """Return the number of ranks that share the graph's weights, and their group; None if weights are replicated."""
    for _, _, ranks, group in marked_slices(gm):
        return ranks, group
    for node in gm.graph.nodes:
        if name_of(node) in FEW_BITS:
            ranks, group = node.args[-2:]
            return ranks, group
    return None

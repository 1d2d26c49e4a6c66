"""Follows slices through a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.passes.ir.graph import find_calls

from .slice_few_bits import FEW_BITS
from .slice_rules import name_of, outcome_of
from .slices import Outcome, Refusal, Slice


@dataclass
class Sliced:
    """What of a graph is sliced, as far as it has been followed.

    Attributes:
        ranks: Over how many ranks.
        slices: Node -> how its value is sliced.
        origins: Node -> names of the parameters from which its slices come.
    """

    ranks: int
    slices: dict[Node, Any] = field(default_factory=dict)
    origins: dict[Node, frozenset[str]] = field(default_factory=dict)

    def slice_of(self, node: object) -> Any:
        """A `Slice`, None for what is replicated, a tuple for several values."""
        return self.slices.get(node) if isinstance(node, Node) else None

    def shape_of(self, node: object) -> Any:
        """The full shape; None for what is no tensor, and a tuple of shapes for several values."""
        value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None
        if isinstance(value, (tuple, list)):
            return tuple(tuple(each.shape) for each in value if isinstance(each, Tensor))
        return tuple(value.shape) if isinstance(value, Tensor) else None

    def hold(self, node: Node, held: Any, origins: frozenset[str]) -> None:
        """Notes how a value is sliced."""
        self.slices[node] = held
        self.origins[node] = origins

    def operands(self, node: Node) -> list[Node]:
        """The operands of a node that are sliced."""
        return [operand for operand in node.all_input_nodes if self.slices.get(operand) is not None]

    def follow(self, node: Node) -> Outcome | Refusal | None:
        """What a node makes of its operands, noted; None where none is sliced, and the node's weight neither."""
        operands = self.operands(node)
        if not (operands or name_of(node) in FEW_BITS) or node.op not in ("call_function", "call_method"):
            return None
        outcome = outcome_of(node, self)
        if isinstance(outcome, Outcome) and outcome.out is not None:
            self.hold(node, outcome.out, frozenset().union(*(self.origins[operand] for operand in operands)))
        return outcome


def marked_slices(gm: GraphModule) -> Iterator[tuple[Node, Slice, int, str]]:
    """The sliced parameters that a graph reads: marker, slice, number of ranks, group."""
    marker = torch.ops.dsgraph.gather_slices  # Dynamo captures what was called: the op, or its overload
    for node in [*find_calls(gm, marker), *find_calls(gm, marker.default)]:
        rest: Any = node.args[1:]
        dim, parts, ranks, group = rest
        yield node, Slice(dim, parts), ranks, group


def sharing_ranks(gm: GraphModule) -> tuple[int, str] | None:
    """How many ranks share the weights that a graph reads, and the name of their group; None: each is replicated."""
    for _, _, ranks, group in marked_slices(gm):
        return ranks, group
    for node in gm.graph.nodes:
        if name_of(node) in FEW_BITS:
            ranks, group = node.args[-2:]
            return ranks, group
    return None

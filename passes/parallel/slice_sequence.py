"""Slicing of what lies between tensor-parallel products: norms, dropout and residuals, along rows or the sequence.

    before:  h = x + sum_slices(a, "tp"); n = rms_norm(h, w); e = enter_slices(n, "tp")
    after:   h = own_slice(x, 1, ...) + scatter_sum(a, 1, ...)         this rank's tokens
             n = rms_norm(h, enter_slices(w)); e = gather_entered(n, 1, ...)

A sum over ranks becomes a reduce-scatter, the entry into the next products an all-gather: together the bytes of the
all-reduce that they replace, and the values between take 1/ranks of the memory. Weights of norms are entered, so that
their gradients are sums over the tokens of all ranks. The method is that of Korthikanti et al.: Reducing Activation
Recomputation in Large Transformer Models, arXiv 2205.05198, section 4.2.2; the first dimension is sliced instead of the
second if ranks divide it, because this copies nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from typing_extensions import override

from dsgraph.passes.ir.graph import find_calls, replace_and_erase
from dsgraph.passes.kernels.matching import call_of

from .rewrite_slices import Rewriting
from .slice_rules import POINTWISE, outcome_of
from .slice_views import VIEWS
from .slice_walk import Sliced
from .slice_writes import refuse_writes
from .slices import Outcome, Refusal, Slice, Values, name_of

_own = torch.ops.dsgraph
_BETWEEN_PRODUCTS = frozenset(
    {*POINTWISE, *VIEWS, "dropout", "layer_norm", "rms_norm", "mean", "sum", "var", "transpose"}
)


def slice_sequence(gm: GraphModule, ranks: int, group: str, *, own: Collection[Node]) -> list[str]:
    """Slice the values between tensor-parallel products, where a sum over ranks and calls on its result allow it.

    Args:
        gm: A captured graph after `SliceTensors`; it is changed.
        ranks: Number of tensor-parallel ranks.
        group: Name of their group.
        own: The nodes whose values are this rank's slices along other dimensions, such as heads.

    Returns:
        Notes on values that stay replicated or are gathered.
    """
    places, notes = dict[Node, Slice](), list[str]()
    for node in find_calls(gm, _own.sum_slices.default):
        found = _place(node, ranks)
        if isinstance(found, Slice):
            places[node] = found
        else:
            notes.append(f"{node.name} stays an all-reduce: {found.reason}")
    rule = partial(_outcome, own=own)
    alone = _without_effect(gm, places, Sliced(ranks, rule))
    if alone:
        names = ", ".join(node.name for node in alone)
        notes.append(f"{names} stays an all-reduce: no slice of it would reach the next sharded product")
    places = {node: held for node, held in places.items() if node not in alone}
    if not places:
        return notes
    rewriting = _SequenceRewriting(gm, Sliced(ranks, rule), group, sums=places)
    for node in list(gm.graph.nodes):
        rewriting.visit(node)
    rewriting.refresh_values()
    return [*notes, *rewriting.notes]


def _outcome(node: Node, values: Values, *, own: Collection[Node]) -> Outcome | Refusal:
    """Return the outcome of a call between products; others, such as a replicated product, get all tokens."""
    call = call_of(node)
    if any(operand in own for operand in node.all_input_nodes):
        return Refusal(f"{name_of(node)} reads a value that is sharded in another way as well")
    if not {call.kind if call is not None else "", name_of(node)} & _BETWEEN_PRODUCTS:
        return Refusal(f"{name_of(node)} reads the tokens of all ranks")
    return outcome_of(node, values)


def _place(node: Node, ranks: int) -> Slice | Refusal:
    """Return the slice of a sum, `[rows, tokens, ..., width]` or `[rows * tokens, width]`."""
    shape, viewed = _shapes(node)
    if len(shape) < 2 or not all(isinstance(size, int) for size in viewed):
        return Refusal(f"its sizes {list(shape)} are dynamic, or too few: compile with dynamic=False")
    rows, tokens = viewed[0], viewed[1] if len(viewed) > 2 else 1
    if rows % ranks and tokens % ranks:
        return Refusal(f"{ranks} ranks cannot share its {rows} rows of {tokens} tokens evenly")
    by_tokens = Slice(0, rows) if len(viewed) > len(shape) else Slice(1)
    return refuse_writes(node, Sliced(ranks)) or (by_tokens if rows % ranks else Slice(0))


def _shapes(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a sum, and the one that a later view splits its tokens into: `[rows, tokens, width]`."""
    shape = later = tuple(node.meta["example_value"].shape)
    while len(node.users) == 1 and len(shape) == 2 and later == shape:
        (node,) = node.users
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            break
        later = tuple(value.shape)
    return shape, later if len(later) == len(shape) + 1 and later[-1] == shape[-1] else shape


def _without_effect(gm: GraphModule, sums: Mapping[Node, Slice], known: Sliced) -> list[Node]:
    """Return the sums whose slices never reach a sharded product: slicing them would only add a gather."""
    arrived, together = set[str](), list[frozenset[str]]()
    for node in gm.graph.nodes:
        if node in sums:
            known.hold(node, sums[node], frozenset({node.name}))
        elif node.target == _own.enter_slices.default and known.slice_of(node.args[0]) is not None:
            arrived |= known.origins[node.args[0]]
        elif isinstance(known.follow(node), Outcome):
            together.append(known.origins.get(node, frozenset()))
    while more := [names for names in together if names & arrived and not names <= arrived]:
        arrived = arrived.union(*more)
    return [node for node in sums if node.name not in arrived]


@dataclass
class _SequenceRewriting(Rewriting):
    """A graph in which sums over ranks are rewritten, and what depends on them."""

    sums: Mapping[Node, Slice] = field(kw_only=True)

    @override
    def visit(self, node: Node) -> None:
        source = node.args[0] if node.args else None
        if node in self.sums:
            made = self._replaced(node, _own.scatter_sum.default, source, self.sums[node])
            self.known.hold(made, self.sums[node], frozenset())
            self._local[made] = made
        elif node.target == _own.enter_slices.default and isinstance(held := self.known.slice_of(source), Slice):
            assert isinstance(source, Node)
            self._replaced(node, _own.gather_entered.default, self._local[source], held)
        else:
            super().visit(node)

    def _replaced(self, node: Node, target: Any, operand: Any, held: Slice) -> Node:
        made = self._emit(node, target, operand, held.dim, held.parts, self.known.ranks, self.group)
        made.meta["example_value"] = node.meta["example_value"]
        replace_and_erase(node, made)
        return made

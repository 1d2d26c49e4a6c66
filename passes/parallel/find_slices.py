"""Finds the parameters of a model that can be tensor-parallel, on its captured graph.

Every product with a weight is first assumed to have a weight that can be sliced: along its inputs if its operand is
sliced along them already, otherwise along its outputs. Slices are followed from there. If they reach a call that does
not support them, the parameters from which they came stay replicated, those of equal name in all layers together, and
the search restarts. So it ends with pairs of products between which nothing needs to be gathered, or with replicated
parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

from torch.fx import GraphModule, Node

from .slice_products import Product, dim_before, product_of, weight_chain
from .slice_walk import Sliced
from .slices import Outcome, Refusal, Slice, name_of

# Tables of fewer rows are not worth a sum at each lookup.
VOCABULARY = 8192
# Calls that may receive a gathered value: a loss, and the model's caller.
_ENDS = frozenset({"cross_entropy"})


@dataclass
class FoundSlices:
    """The result of the search.

    Attributes:
        slices: Name of a parameter -> its slice.
        whole: Name of a parameter of a product -> why it stays replicated.
    """

    slices: dict[str, Slice] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


def find_slices(
    gm: GraphModule,
    names: Mapping[Node, str],
    *,
    ranks: int,
    given: Mapping[str, Slice] | None = None,
    fixed: Mapping[Node, Slice] = MappingProxyType({}),
) -> FoundSlices:
    """Return the parameters of a graph that can be sliced.

    Args:
        gm: A captured graph with `example_value`s.
        names: Placeholders of parameters -> their names.
        ranks: Number of ranks.
        given: The sliced parameters; then no others are, and only the number of their pieces is found. None: all that
            can be.
        fixed: Other values of the graph that are sliced already.
    """
    search = _Search(gm, names, ranks, dict(given or {}), fixed, is_given=given is not None)
    while search.walk():
        pass
    return search.found


class _AgainError(Exception):
    """Restarts the search after something was learned."""


@dataclass
class _Search:
    gm: GraphModule
    names: Mapping[Node, str]
    ranks: int
    given: dict[str, Slice]
    fixed: Mapping[Node, Slice]
    is_given: bool
    parts: dict[str, int] = field(default_factory=dict)
    tried: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    found: FoundSlices = field(default_factory=FoundSlices)

    def walk(self) -> bool:
        """Follow slices through the graph; return False if nothing more was learned."""
        self.found = FoundSlices()
        known = Sliced(self.ranks)
        for node, held in self.fixed.items():
            known.hold(node, held, frozenset())
        for node, name in self.names.items():
            if name in self.given:
                held = self.given[name]
                held = Slice(held.dim, self.parts.get(layer_pattern(name), held.parts))
                known.hold(node, held, frozenset({name}))
                self.found.slices[name] = held
        try:
            for node in self.gm.graph.nodes:
                self._visit(node, known)
        except _AgainError:
            return True
        return False

    def _visit(self, node: Node, known: Sliced) -> None:
        product = product_of(node, known) if node.op == "call_function" else None
        if product is not None and not self.is_given:
            self._decide(product, known)
        if name_of(node) == "embedding" and not self.is_given:
            self._decide_table(node, known)
        outcome = known.follow(node)
        if isinstance(outcome, Outcome) and outcome.is_partial and not self._reads_parameter(node):
            outcome = Refusal("a product of two values sums over the sharded dimension")
        if isinstance(outcome, Refusal) and name_of(node) not in _ENDS:
            blamed = outcome.blamed or known.operands(node)
            self._learn(outcome, frozenset().union(*(known.origins[operand] for operand in blamed)))

    def _decide(self, product: Product, known: Sliced) -> None:
        """Slice the weight of a product, unless it is known to stay replicated."""
        chain = weight_chain(product.weight)
        name = self.names.get(chain[-1])
        if name is None or any(known.slice_of(node) is not None for node in chain):
            return
        others = [name_of(user) for user in chain[-1].users if user not in (product.node, *chain)]
        reason = f"{others[0]} reads it as well" if others else self.whole.get(layer_pattern(name))
        held = known.slice_of(product.x)
        is_row = isinstance(held, Slice) and held.dim == len(known.shape_of(product.x)) - 1
        if held is not None and not is_row:
            reason = reason or "its other operand is sharded along another dimension"
        dim, parts = (
            (product.inputs, held.parts) if is_row else (product.outputs, self.parts.get(layer_pattern(name), 1))
        )
        size = known.shape_of(product.weight)[dim]
        if reason is None and size % (self.ranks * parts):
            reason = f"its dimension of {size} cannot be divided by {self.ranks} ranks"
        if reason is not None:
            self.found.whole[name] = reason
            return
        self._hold(chain, Slice(dim, parts), frozenset({name}), known)
        bias = self.names.get(product.bias)
        if bias is not None and not is_row and known.slice_of(product.bias) is None:
            self._hold([product.bias], Slice(0, parts), frozenset({name}), known)

    def _decide_table(self, node: Node, known: Sliced) -> None:
        """Slice the rows of a vocabulary's table, and with it an output layer that shares it."""
        table = node.args[1]
        name = self.names.get(table)  # type: ignore[arg-type]
        if name is None or known.slice_of(table) is not None or known.shape_of(table)[0] < VOCABULARY:
            return
        assert isinstance(table, Node)
        products = [product_of(user, known) for user in table.users if name_of(user) != "embedding"]
        reads = [product is not None and product.weight is table and product.outputs == 0 for product in products]
        reason = None if all(reads) else "a call that is no lookup reads it as well"
        if known.shape_of(table)[0] % self.ranks:
            reason = f"its {known.shape_of(table)[0]} rows cannot be divided by {self.ranks} ranks"
        reason = reason or self.whole.get(layer_pattern(name))
        if reason is not None:
            self.found.whole[name] = reason
            return
        self._hold([table], Slice(0), frozenset({name}), known)

    def _hold(self, chain: list[Node], held: Slice, origins: frozenset[str], known: Sliced) -> None:
        """Note the slice of a weight, of the tensor that it is a transpose of, and so on up to the parameter."""
        known.hold(chain[0], held, origins)
        for made, source in pairwise(chain):
            held = Slice(dim_before(made, held.dim, len(known.shape_of(source))), held.parts)
            known.hold(source, held, origins)
        self.found.slices[self.names[chain[-1]]] = held

    def _reads_parameter(self, node: Node) -> bool:
        weights = (*self.names, *self.fixed)
        return any(weight_chain(operand)[-1] in weights for operand in node.all_input_nodes)

    def _learn(self, refusal: Refusal, origins: frozenset[str]) -> None:
        """Note the consequences of a refused call for the parameters from which its slices come."""
        patterns = {layer_pattern(name) for name in origins}
        if refusal.parts and any(self.parts.get(pattern, 1) == 1 for pattern in patterns):
            self.parts.update(dict.fromkeys(patterns, refusal.parts))
            self.tried.update(dict.fromkeys(patterns, refusal.reason))
            raise _AgainError
        if self.is_given:
            return
        unknown = patterns - self.whole.keys()
        if unknown:
            self.whole.update({pattern: self.tried.get(pattern, refusal.reason) for pattern in unknown})
            raise _AgainError


def layer_pattern(name: str) -> str:
    """Return a parameter's name without the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)

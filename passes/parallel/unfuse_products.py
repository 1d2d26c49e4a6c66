"""Products with fused weights whose pieces have different sizes, as of queries, keys and values of grouped heads.

before:  y = linear(x, w); q = y[..., :32]; k = y[..., 32:40]; v = y[..., 40:]
after:   q = linear(x, w[:32]); k = linear(x, w[32:40]); v = linear(x, w[40:])

No slice of `w` is a slice of each piece. After this each piece has a product of its own, which can be sharded by heads,
or stay replicated if it has one head. `split` or an index of heads may make the pieces of `y` as well. Pieces of equal
size are left alone: `Slice.parts` describes them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from dsgraph.passes.kernels.matching import call_of

from .example_values import evaluate
from .slice_products import Product, dim_before, product_of, weight_chain
from .slices import Values, name_of, same, sizes_of


@dataclass(frozen=True)
class WeightPiece:
    """A piece of a fused weight.

    Attributes:
        node: The index into the weight.
        root: The weight.
        dim: The dimension of its outputs.
        first: The first of the piece's outputs.
        last: The end of them.
    """

    node: Node
    root: Node
    dim: int
    first: int
    last: int


@dataclass(frozen=True)
class _Piece:
    """A piece of a product's result: its node, and its range of outputs in units of `width`, the size of a head."""

    node: Node
    first: int
    last: int
    width: int = 1
    view: Node | None = None


def unfuse_products(gm: GraphModule, roots: Mapping[Node, int | None], values: Values) -> list[WeightPiece]:
    """Give each piece of a fused product a product of its own, in place.

    Args:
        gm: A captured graph with `example_value`s.
        roots: Weights that may be split -> the dimension that must be that of their outputs; None: any.
        values: Shapes of the graph's values.
    """
    found: list[WeightPiece] = []
    for node in list(gm.graph.nodes):
        product = product_of(node, values)
        chain = weight_chain(product.weight) if product is not None else []
        if product is None or chain[-1] not in roots or any(len(each.users) != 1 for each in chain):
            continue
        dim = _outputs_of_root(product, chain, values)
        pieces = list(_pieces(node, values)) if roots[chain[-1]] in (None, dim) else []
        if len({(piece.last - piece.first) for piece in pieces}) < 2:
            continue
        found.extend(_with_own_product(piece, product, chain, dim) for piece in pieces)
        for dead in (pieces[0].view, node, *chain[:-1]):
            if dead is not None:
                gm.graph.erase_node(dead)
    return found


def _pieces(out: Node, values: Values) -> Iterator[_Piece]:
    """Yield the pieces of a product's result; nothing if it is read in another way as well."""
    shape, users = values.shape_of(out), list(out.users)
    first = users[0] if len(users) == 1 else None
    call = call_of(first)
    if first is not None and call is not None and call.kind == "split" and call["dim"] % len(shape) == len(shape) - 1:
        starts = [0]
        for piece in values.shape_of(first):
            starts.append(starts[-1] + piece[-1])
        if all(name_of(user) == "getitem" for user in first.users):
            for user in first.users:
                number: Any = user.args[1]
                yield _Piece(user, starts[number], starts[number + 1], view=first)
        return
    view, width = None, 1
    if first is not None and name_of(first) in ("view", "reshape"):
        heads = values.shape_of(first)
        if len(heads) != len(shape) + 1 or not all(map(same, shape[:-1], heads)) or sizes_of(first) is None:
            return
        view, width, users, shape = first, heads[-1], list(first.users), heads[:-1]
    ranges = [_range(user, len(shape), shape[-1], trailing=view is not None) for user in users]
    for user, taken in zip(users, ranges, strict=True):
        if taken is not None and None not in ranges:
            yield _Piece(user, *taken, width, view)


def _range(user: Node, dims: int, size: int, *, trailing: bool) -> tuple[int, int] | None:
    """Return the range that an index takes of the last dimension, or of the one before it; None for another call."""
    if name_of(user) != "getitem" or not isinstance(size, int):
        return None
    items = list(user.args[1]) if isinstance(user.args[1], tuple) else [user.args[1]]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (dims + trailing - len(items) + 1)
    if len(items) < dims or any(item != slice(None) for item in (*items[: dims - 1], *items[dims:])):
        return None
    item = items[dims - 1]
    if isinstance(item, list) and len(item) == 1 and isinstance(item[0], int):
        return item[0] % size, item[0] % size + 1
    if not isinstance(item, slice) or item.step not in (None, 1):
        return None
    if not all(isinstance(bound, (int, type(None))) for bound in (item.start, item.stop)):
        return None
    first, last, _ = item.indices(size)
    return (first, last) if first < last else None


def _outputs_of_root(product: Product, chain: list[Node], values: Values) -> int:
    dim = product.outputs
    for made in chain[:-1]:
        dim = dim_before(made, dim, len(values.shape_of(chain[-1])))
    return dim


def _with_own_product(piece: _Piece, product: Product, chain: list[Node], dim: int) -> WeightPiece:
    graph, root = piece.node.graph, chain[-1]
    rows = slice(piece.first * piece.width, piece.last * piece.width)
    copies: dict[Node, Node] = {}
    with graph.inserting_before(piece.node):
        copies[root] = graph.call_function(operator.getitem, (root, (*[slice(None)] * dim, rows)))
        if isinstance(product.bias, Node):
            copies[product.bias] = graph.call_function(operator.getitem, (product.bias, rows))
        for node in (*reversed(chain[:-1]), product.node):
            copies[node] = graph.node_copy(node, lambda read: copies.get(read, read))
        made = list(copies.values())
        sizes = sizes_of(piece.view) if piece.view is not None and name_of(piece.view) != "split" else None
        if sizes is not None:
            shape = (*sizes[:-2], piece.last - piece.first, piece.width)
            made.append(graph.call_method("view", (copies[product.node], *shape)))
    for node in made:
        node.meta["example_value"] = evaluate(node)
    piece.node.replace_all_uses_with(made[-1])
    graph.erase_node(piece.node)
    return WeightPiece(copies[root], root, dim, rows.start, rows.stop)

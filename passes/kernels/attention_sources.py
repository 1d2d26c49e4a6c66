"""Decides whether queries and keys of an attention come from one sequence, or from two (cross-attention)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from dsgraph.inductor_ext.compat import size_hint

from .matching import Call, call_of, fake_of, value_of

# Calls that only scale and shift each token: norms, also as elementary ops.
_KEEPING = frozenset(
    {
        *("cast", "contiguous", "reshape", "transpose", "unflatten", "dropout", "layer_norm", "rms_norm"),
        *("mul", "div", "sub", "add", "mean", "var", "pow", "square", "sqrt", "rsqrt", "reciprocal"),
    }
)
_MIXING = frozenset({"fused_attention", "softmax", "softmax_method"})
# Depth in calls to which two expressions are compared, and number of calls before a projection that are read.
_MOST_STEPS, _MOST_STEM = 12, 48


def why_not_self(q: Node, k: Node, v: Node) -> str | None:
    """Return why an attention is not self-attention; None if it is.

    It is one if queries and keys are projections of the same tokens, up to norms before the projections. An attention
    over three inputs of the graph, which are not projected in it, is taken for one: the graph does not show more.

    Args:
        q: Queries `[b, heads, l, d]`.
        k: Keys, in any order of dimensions.
        v: Values.
    """
    asking, answering = _projected(q), _projected(k)
    if not asking and not answering:
        first, second, third = (_inputs(node) for node in (q, k, v))
        if first == second or second != third or not first or not second:
            return None
        return _said(min(first), min(second))
    if not asking or not answering:
        return _said(asking[0] if asking else q, answering[0] if answering else k)
    apart = next((each for each in asking + answering if not _same(each, asking[0], _MOST_STEPS)), None)
    if apart is not None:
        one = next((each for each in asking if each not in answering), asking[0])
        return _said(one, next((each for each in answering if not _same(each, one, _MOST_STEPS)), apart))
    return _why_parts(q, asking)


def _said(one: Node, other: Node) -> str:
    return (
        f"its queries come from {one.name} and its keys from {other.name}, as in cross-attention, over which a layout "
        "says nothing"
    )


def _projected(node: Node) -> list[Node]:
    """Return the inputs of the nearest products with weights from which a value is computed."""
    found: dict[Node, None] = {}
    frontier, seen = [node], {node}
    while frontier:
        item = frontier.pop()
        source = _input_of_product(item)
        if source is not None:
            found[source] = None
            continue
        call = call_of(item)
        if call is not None and call.kind in _MIXING:
            continue
        for each in _operands(item):
            if each not in seen:
                seen.add(each)
                frontier.append(each)
    return list(found)


def _input_of_product(node: Node) -> Node | None:
    """Return the tokens that a product with a weight or a convolution reads; None for other nodes."""
    call = call_of(node)
    if call is not None and call.kind == "linear":
        return _node(call.input)
    if call is not None and call.kind == "addmm":
        return _node(call["mat1"])
    if call is not None and call.kind == "matmul":
        return _of_matmul(call)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_function" and name.startswith("conv") and node.args:
        return _node(node.args[0])
    if node.op == "call_function" and name == "einsum":
        tokens = [each for each in _operands(node) if not _is_flat(each)]
        return tokens[0] if len(tokens) == 1 else None
    return None


def _of_matmul(call: Call) -> Node | None:
    one, other = call["input"], call["other"]
    first, second = value_of(one), value_of(other)
    if first is None or second is None:
        return None
    if _is_weight(other) or (second.ndim == 2 and first.ndim > 2):
        return _node(one)
    return _node(other) if _is_weight(one) else None


def _is_flat(node: Node) -> bool:
    value = value_of(node)
    return value is not None and value.ndim <= 2


def _operands(node: Node) -> list[Node]:
    """Return the arguments that may contain tokens: no weights, masks or indices."""
    return [each for each in node.all_input_nodes if not _is_weight(each) and _holds_numbers(each)]


def _holds_numbers(node: Node) -> bool:
    value = fake_of(node)
    return value.dtype.is_floating_point if isinstance(value, Tensor) else isinstance(value, (tuple, list))


def _is_weight(node: object) -> bool:
    """Return True for a parameter, or a value computed only from parameters."""
    if not isinstance(node, Node):
        return False
    if node.op in ("placeholder", "get_attr"):
        return isinstance(value_of(node), nn.Parameter)
    return bool(node.all_input_nodes) and all(_is_weight(each) for each in node.all_input_nodes)


def _inputs(node: Node) -> frozenset[Node]:
    """Return the graph inputs from which a value that is not projected is computed."""
    found, frontier, seen = set[Node](), [node], {node}
    while frontier:
        item = frontier.pop()
        if item.op in ("placeholder", "get_attr"):
            found.add(item)
        new = [each for each in _operands(item) if each not in seen]
        seen.update(new)
        frontier += new
    return frozenset(found)


def _stem(node: Node, steps: int) -> Node:
    """Return the tokens before norms, and before a low-rank product (fewer outputs than inputs)."""
    if steps == 0:
        return node
    call = call_of(node)
    if call is not None and call.kind == "linear" and (tokens := _node(call.input)) is not None:
        made, read = value_of(node), value_of(tokens)
        narrows = made is not None and read is not None and _is_less(made.shape[-1], read.shape[-1])
        return _stem(tokens, steps - 1) if narrows else node
    if call is not None and call.kind == "getitem" and isinstance(node.args[0], Node):
        return _stem_of_piece(node, node.args[0], steps)
    if call is None or call.kind not in _KEEPING:
        return node
    stems = {_stem(each, steps - 1) for each in _operands(node)}
    return stems.pop() if len(stems) == 1 else node


def _stem_of_piece(node: Node, pieces: Node, steps: int) -> Node:
    """Return the tokens of which a node is a part of the width, as in `latent, rotated = split(x, [...], dim=-1)`."""
    call, made = call_of(pieces), value_of(node)
    read = value_of(call.input) if call is not None and call.kind in ("split", "chunk") else None
    if call is None or made is None or read is None or call["dim"] not in (-1, read.ndim - 1):
        return node
    return _stem(call.input, steps - 1)


def _same(one: Node, other: Node, steps: int) -> bool:
    """Return True if two nodes are the same tokens, up to norms, or the same expression of the same tokens."""
    one, other = _stem(one, _MOST_STEM), _stem(other, _MOST_STEM)
    if one is other:
        return True
    if steps == 0 or one.op != other.op or one.op == "placeholder" or one.target != other.target:
        return False
    mine, theirs = (_flat((node.args, tuple(node.kwargs.items()))) for node in (one, other))
    return len(mine) == len(theirs) and all(
        _same(a, b, steps - 1) if isinstance(a, Node) and isinstance(b, Node) else type(a) is type(b) and a == b
        for a, b in zip(mine, theirs, strict=True)
    )


def _flat(given: Any) -> list[Any]:
    if isinstance(given, (tuple, list)):
        return [item for each in given for item in _flat(each)]
    return [given]


def _why_parts(q: Node, sources: Sequence[Node]) -> str | None:
    """Return why queries do not cover all projected tokens; None if they do, or if sizes are unknown."""
    value, read = value_of(q), value_of(sources[0])
    if value is None or read is None or value.ndim != 4 or len(sources) > 1:
        return None
    product = next((user for user in sources[0].users if _input_of_product(user) is sources[0]), None)
    call = call_of(product)
    if call is None or call.kind not in ("linear", "addmm", "matmul"):
        return None
    queries = [size_hint(size) for size in (value.shape[0], value.shape[2])]
    tokens = [size_hint(size) for size in read.shape[:-1]]
    if None in queries or None in tokens:
        return None
    had, asked = _product(tokens), _product(queries)
    return None if had == asked else f"it has {asked} queries of the {had} tokens of {sources[0].name}"


def _product(sizes: Sequence[int | None]) -> int:
    return int(torch.Size([size or 0 for size in sizes]).numel())


def _is_less(one: Any, other: Any) -> bool:
    first, second = size_hint(one), size_hint(other)
    return first is not None and second is not None and first < second


def _node(given: object) -> Node | None:
    return given if isinstance(given, Node) else None

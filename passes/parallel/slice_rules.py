"""Rules for calls of a captured graph with sliced operands, one for each kind of call.

A rule gets a node with at least one sliced operand, and returns an `Outcome`, or a `Refusal`: then the operands are
gathered, and the call runs on full values. So a call without a rule is slow but never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from dsgraph.passes.kernels.matching import call_of, transpose_of, writes

from .slice_cache import CACHE
from .slice_few_bits import FEW_BITS
from .slice_products import PRODUCTS
from .slice_vocabulary import VOCABULARY
from .slices import Outcome, Refusal, Slice, Values, same, through_reshape

Rule = Callable[[Node, Values], Outcome | Refusal]

# Calls that work element by element, on operands that are broadcast.
_POINTWISE = (
    "add sub mul div pow neg rsqrt sqrt square reciprocal sigmoid tanh erf exp not eq ne le ge lt gt and or silu relu "
    "leaky_relu softplus gelu masked_fill where cast contiguous clone detach cos sin log abs clamp float to type_as"
)
POINTWISE = frozenset(_POINTWISE.split())


def outcome_of(node: Node, values: Values) -> Outcome | Refusal:
    """Return the outcome of a call with at least one sliced operand."""
    if writes(node) and name_of(node) not in CACHE:
        return Refusal(f"{name_of(node)} writes to it")
    if transpose_of(node) is not None:
        return _transpose(node, values)
    call = call_of(node)
    for kind in (call.kind if call is not None else "", name_of(node)):
        if kind in RULES:
            return RULES[kind](node, values)
    return Refusal(f"{name_of(node)} is not known to work on slices")


def name_of(node: Node) -> str:
    """Return the human-readable name of a node's function."""
    target: Any = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def tensors_of(node: Node, values: Values) -> list[Node]:
    """Return the operands of a call that are tensors."""
    return [operand for operand in node.all_input_nodes if values.shape_of(operand) is not None]


def pointwise(node: Node, values: Values, dims: int | None = None) -> Outcome | Refusal:
    """Apply the rule of pointwise calls: all operands are sliced at the same place of the result."""
    count = len(values.shape_of(node)) if dims is None else dims
    held: Slice | None = None
    for operand in tensors_of(node, values):
        found = values.slice_of(operand)
        if not isinstance(found, Slice):
            continue
        placed = Slice(found.dim + count - len(values.shape_of(operand)), found.parts)
        if held is not None and placed != held:
            return Refusal(f"{name_of(node)} of operands that are sharded in two ways")
        held = placed
    assert held is not None
    takes = {}
    for operand in tensors_of(node, values):
        shape = values.shape_of(operand)
        at = held.dim - (count - len(shape))
        if values.slice_of(operand) is None and at >= 0 and not same(shape[at], 1):
            takes[operand] = Slice(at, held.parts)
    return Outcome(held, takes)


def _transpose(node: Node, values: Values) -> Outcome | Refusal:
    held, dims = _only_slice(node, values), len(values.shape_of(node))
    call = call_of(node)
    first, second = (call["dim0"] % dims, call["dim1"] % dims) if call is not None else (dims - 2, dims - 1)
    swapped = {first: second, second: first}
    return Outcome(Slice(swapped.get(held.dim, held.dim), held.parts))


def _permute(node: Node, values: Values) -> Outcome | Refusal:
    held, order = _only_slice(node, values), _sizes(node)
    assert order is not None
    return Outcome(Slice([dim % len(order) for dim in order].index(held.dim), held.parts))


def _reshape(node: Node, values: Values) -> Outcome | Refusal:
    held, source = _only_slice(node, values), node.args[0]
    after = values.shape_of(node)
    found = through_reshape(values.shape_of(source), after, held, values.ranks)
    if isinstance(found, Refusal) or name_of(node) not in ("view", "reshape"):
        return found if isinstance(found, Refusal) else Outcome(found)
    return _with_local_size(node, found, values)


def _expand(node: Node, values: Values) -> Outcome | Refusal:
    held = _only_slice(node, values)
    moved = Slice(held.dim + len(values.shape_of(node)) - len(values.shape_of(node.args[0])), held.parts)
    return _with_local_size(node, moved, values)


def _with_local_size(node: Node, held: Slice, values: Values) -> Outcome | Refusal:
    """Return the call with the size of the sliced dimension, if it is an argument, divided by the ranks."""
    sizes = _sizes(node)
    if sizes is None:
        return Refusal(f"{name_of(node)} whose sizes cannot be read")
    size = sizes[held.dim]
    if not isinstance(size, int):
        return Refusal(f"{name_of(node)} whose size of the sharded dimension is not fixed")
    if size != -1:
        sizes[held.dim] = size // values.ranks
    return Outcome(held, args=(node.args[0], tuple(sizes)), kwargs={})


def _sizes(node: Node) -> list[Any] | None:
    given = node.args[1:] or tuple(node.kwargs.values())
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        return list(given[0])
    return None if any(isinstance(size, (tuple, list, torch.dtype)) for size in given) else list(given)


def _getitem(node: Node, values: Values) -> Outcome | Refusal:
    source, index = node.args[0], node.args[1]
    held = values.slice_of(source)
    if isinstance(held, tuple):
        assert isinstance(index, int)
        return Outcome(held[index])
    if not isinstance(held, Slice):
        return Refusal("an index that is sharded")
    items: Sequence[Any] = index if isinstance(index, tuple) else (index,)
    if any(not (item is None or item is Ellipsis or isinstance(item, (int, slice))) for item in items):
        return Refusal("an index that picks elements")
    dims = len(values.shape_of(source))
    taken = sum(item is not None and item is not Ellipsis for item in items)
    full = [each for item in items for each in ([slice(None)] * (dims - taken) if item is Ellipsis else [item])]
    at, out = 0, 0
    for item in full:
        if item is not None and at == held.dim:
            return Outcome(Slice(out, held.parts)) if item == slice(None) else Refusal("an index into its slices")
        at += item is not None
        out += not isinstance(item, int) or isinstance(item, bool)
    return Outcome(Slice(held.dim - at + out, held.parts))


def _divide(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of `split` and `chunk`."""
    held, call = _only_slice(node, values), call_of(node)
    assert call is not None
    source = values.shape_of(call.input)
    shapes = values.shape_of(node)
    if call["dim"] % len(source) != held.dim:
        return Outcome((held,) * len(shapes))
    sizes = [shape[held.dim] for shape in shapes]
    if len(set(sizes)) != 1 or sizes[0] % values.ranks:
        return Refusal(f"{name_of(node)} into {sizes}, of which {values.ranks} ranks cannot share each evenly")
    if held.parts != len(sizes):
        hint = len(sizes) if held.parts == 1 else 0
        return Refusal(f"{name_of(node)} into {len(sizes)} pieces of a tensor that is sharded as {held.parts}", hint)
    if call.kind == "split":
        return Outcome(
            (Slice(held.dim),) * len(sizes), args=(call.input, sizes[0] // values.ranks, held.dim), kwargs={}
        )
    return Outcome((Slice(held.dim),) * len(sizes))


def _cat(node: Node, values: Values) -> Outcome | Refusal:
    call = call_of(node)
    assert call is not None
    dims = len(values.shape_of(node))
    # Legacy: torch lets an empty vector stand in for nothing.
    operands = [operand for operand in call["tensors"] if len(values.shape_of(operand)) == dims]
    held = next(found for operand in operands if (found := values.slice_of(operand)) is not None)
    if any(values.slice_of(operand) not in (None, held) for operand in operands):
        return Refusal("cat of operands that are sharded in two ways")
    if call["dim"] % dims == held.dim:
        return Refusal("cat along the sharded dimension")
    return Outcome(held, {operand: held for operand in operands if values.slice_of(operand) is None})


def _along(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of reductions and normalisations along dimensions."""
    call, held = call_of(node), _only_slice(node, values)
    assert call is not None
    dims = len(values.shape_of(call.input))
    given = call["dim"]
    along = range(dims) if given is None else [given] if isinstance(given, int) else given
    reduced = {dim % dims for dim in along}
    if held.dim in reduced:
        return Refusal(f"{name_of(node)} along the sharded dimension")
    if call.kind == "softmax" or call["keepdim"]:
        return Outcome(held)
    return Outcome(Slice(held.dim - sum(dim < held.dim for dim in reduced), held.parts))


def _norm(node: Node, values: Values) -> Outcome | Refusal:
    call = call_of(node)
    assert call is not None
    held = values.slice_of(call.input)
    if not isinstance(held, Slice) or values.slice_of(call["weight"]) is not None:
        return Refusal(f"{name_of(node)} whose weight is sharded")
    if held.dim >= len(values.shape_of(node)) - len(call["normalized_shape"]):
        return Refusal(f"{name_of(node)} along the sharded dimension")
    return Outcome(held)


def _dropout(node: Node, values: Values) -> Outcome | Refusal:
    call = call_of(node)
    assert call is not None
    held = _only_slice(node, values)
    return Outcome(held, draws=bool(call["training"]) and call["p"] != 0)


def _stack(node: Node, values: Values) -> Outcome | Refusal:
    call = call_of(node)
    assert call is not None
    held = next(found for operand in call["tensors"] if (found := values.slice_of(operand)) is not None)
    if any(values.slice_of(operand) not in (None, held) for operand in call["tensors"]):
        return Refusal("stack of operands that are sharded in two ways")
    at = call["dim"] % len(values.shape_of(node))
    takes = {operand: held for operand in call["tensors"] if values.slice_of(operand) is None}
    return Outcome(Slice(held.dim + (at <= held.dim), held.parts), takes)


def _only_slice(node: Node, values: Values) -> Slice:
    held = values.slice_of(node.args[0])
    assert isinstance(held, Slice)
    return held


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(POINTWISE, pointwise),
        "transpose": _transpose,
        "permute": _permute,
        "reshape": _reshape,
        "view": _reshape,
        "expand": _expand,
        "getitem": _getitem,
        **dict.fromkeys(("split", "chunk"), _divide),
        "cat": _cat,
        "stack": _stack,
        **dict.fromkeys(("mean", "sum", "var", "softmax"), _along),
        **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
        "dropout": _dropout,
        **PRODUCTS,
        **VOCABULARY,
        **CACHE,
        **FEW_BITS,
    }
)

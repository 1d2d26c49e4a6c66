"""Rules for calls of a captured graph with sliced operands, one for each kind of call.

A rule gets a node with at least one sliced operand, and returns an `Outcome`, or a `Refusal`: then the operands are
gathered, and the call runs on full values. So a call without a rule is slow but never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import multiply_own_weight, write_own_heads
from dsgraph.passes.kernels.matching import call_of, transpose_of, writes

from .slice_products import PRODUCTS
from .slice_views import VIEWS, transpose
from .slice_vocabulary import VOCABULARY
from .slice_writes import WRITES, refuse_writes
from .slices import Outcome, Refusal, Slice, Values, name_of, only_slice, same


def multiply_sliced_weight(node: Node, values: Values) -> Outcome | Refusal:
    """Return columns of the result if outputs are sliced, or a term of the sum over ranks if inputs are."""
    rest: Any = node.args
    x, packed, scale, least, dim, parts = rest[:6]
    held, own = values.slice_of(x), Slice(len(values.shape_of(x)) - 1, parts)
    call: dict[str, Any] = {"target": multiply_own_weight, "args": (x, packed, scale, least), "kwargs": {}}
    if dim == 0 and held is None:
        return Outcome(own, **call)
    if dim == 1 and held in (None, own):
        return Outcome(None, {x: own} if held is None else {}, is_partial=True, **call)
    return Refusal("a matmul with a quantized weight whose input is sharded in another way")


FEW_BITS: Mapping[str, Callable[[Node, Values], Outcome | Refusal]] = MappingProxyType(
    dict.fromkeys(("multiply_sliced_weight", "multiply_sliced_weight.default"), multiply_sliced_weight)
)


_HEADS = Slice(1)


def write_heads(node: Node, values: Values) -> Outcome | Refusal:
    """Let each rank write the heads that it has computed into its own cache."""
    own, states, positions = node.args[:3]
    if values.slice_of(states) != _HEADS:
        return Refusal("a cache is written in slices that are not those of heads")
    return Outcome(_HEADS, target=write_own_heads, args=(own, states, positions), kwargs={})


CACHE: Mapping[str, Callable[[Node, Values], Outcome | Refusal]] = MappingProxyType(
    dict.fromkeys(("write_heads", "write_heads.default"), write_heads)
)


Rule = Callable[[Node, Values], Outcome | Refusal]

# Calls that work element by element, on operands that are broadcast.
_POINTWISE = (
    "add sub mul div pow neg rsqrt sqrt square reciprocal sigmoid tanh erf exp not eq ne le ge lt gt and or silu relu "
    "leaky_relu softplus gelu masked_fill where cast contiguous clone detach cos sin log abs clamp float to type_as"
)
POINTWISE = frozenset(_POINTWISE.split())
# Of a second operand, these read the dtype alone.
_LIKE = ("to", "type_as")


def outcome_of(node: Node, values: Values) -> Outcome | Refusal:
    """Return the outcome of a call with at least one sliced operand."""
    if writes(node) and name_of(node) not in (*CACHE, *WRITES):
        return Refusal(f"{name_of(node)} writes to it")
    outcome = _outcome_of_kind(node, values)
    is_sliced = isinstance(outcome, Outcome) and outcome.out is not None
    return (refuse_writes(node, values) or outcome) if is_sliced else outcome


def _outcome_of_kind(node: Node, values: Values) -> Outcome | Refusal:
    if not node.args and name_of(node) not in BY_KEYWORDS:
        return Refusal(f"{name_of(node)} gets its first argument as a keyword")
    if transpose_of(node) is not None:
        return transpose(node, values)
    call = call_of(node)
    for kind in (call.kind if call is not None else "", name_of(node)):
        if kind in RULES:
            return RULES[kind](node, values)
    return Refusal(f"{name_of(node)} is not known to work on slices")


def tensors_of(node: Node, values: Values) -> list[Node]:
    """Return the operands of a call that are tensors."""
    return [operand for operand in node.all_input_nodes if values.shape_of(operand) is not None]


def pointwise(node: Node, values: Values, dims: int | None = None) -> Outcome | Refusal:
    """Apply the rule of pointwise calls: all operands are sliced at the same place of the result."""
    count = len(values.shape_of(node)) if dims is None else dims
    if name_of(node) in _LIKE:
        held = values.slice_of(node.args[0])
        return Outcome(held if isinstance(held, Slice) else None)
    held = None
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


def _divide(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of `split` and `chunk`."""
    held, call = only_slice(node, values), call_of(node)
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
    call, held = call_of(node), only_slice(node, values)
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
    held = only_slice(node, values)
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


def _own_function(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of an `autograd.Function` that works element by element, such as BLOOM's activation."""
    operands = tensors_of(node, values)
    held, shape = values.slice_of(operands[0]), values.shape_of(operands[0])
    owner, names = node.graph.owning_module, (str(getattr(body, "target", "")) for body in node.args[:2])
    bodies: list[GraphModule] = [getattr(owner, name) for name in names]
    inner = [inside for body in bodies for inside in body.graph.nodes]
    is_plain = all(
        values.shape_of(inside) in (None, shape)
        and (name_of(inside) in (*POINTWISE, "_set_grad_enabled") or inside.op not in ("call_function", "call_method"))
        for inside in inner
    )
    if not is_plain or any(values.slice_of(operand) != held for operand in operands):
        return Refusal("an autograd.Function that does not work element by element")
    return Outcome((held,) * len(values.shape_of(node)))


BY_KEYWORDS = frozenset({*POINTWISE, *PRODUCTS, *VOCABULARY, "layer_norm", "rms_norm"} - {*_LIKE})
"""Calls whose rules read arguments by name."""

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(POINTWISE, pointwise),
        **VIEWS,
        **dict.fromkeys(("split", "chunk"), _divide),
        "cat": _cat,
        "stack": _stack,
        **dict.fromkeys(("mean", "sum", "var", "softmax"), _along),
        **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
        "dropout": _dropout,
        "autograd_function_apply": _own_function,
        **PRODUCTS,
        **VOCABULARY,
        **CACHE,
        **FEW_BITS,
        **WRITES,
    }
)

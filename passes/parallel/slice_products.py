"""Rules for products with sliced operands.

column:  y_r = x @ W_r           W sliced along its outputs: each rank has its columns of y
row:     y   = sum_r x_r @ W_r   W sliced along its inputs, as x is: the sum over ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from dsgraph.passes.kernels.matching import call_of, transpose_of

from .slices import Outcome, Refusal, Slice, Values, same

_UNLIKE = "a matmul whose operands are sharded in two ways"


@dataclass(frozen=True)
class Product:
    """A product with a weight.

    Attributes:
        node: The call.
        x: `[..., inputs]`.
        weight: `[outputs, inputs]` or the other way round, with leading dimensions of experts.
        bias: `[outputs]`, or None.
        inputs: The dimension of the weight's inputs, 0 or more.
        outputs: The dimension of its outputs.
    """

    node: Node
    x: Node
    weight: Node
    bias: Any
    inputs: int
    outputs: int


def product_of(node: Node, values: Values) -> Product | None:
    """Return the product with a weight that a node computes; None for any other call."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    call = call_of(node)
    if call is not None and call.kind == "linear":
        return Product(node, call.input, call["weight"], call["bias"], 1, 0)
    if name == "addmm" and not node.kwargs and len(node.args) == 3:
        bias, x, weight = node.args
        return Product(node, x, weight, bias, 0, 1)  # type: ignore[arg-type]
    if call is not None and call.kind == "matmul" and len(values.shape_of(call["other"]) or ()) == 2:
        return Product(node, call.input, call["other"], None, 0, 1)
    if "grouped_mm" in str(node.target) and len(node.args) >= 2:
        x, weight = node.args[:2]
        if isinstance(x, Node) and isinstance(weight, Node) and len(values.shape_of(weight) or ()) == 3:
            return Product(node, x, weight, None, 1, 2)
    return None


def weight_chain(weight: Node) -> list[Node]:
    """Return a weight, the tensor of which it is a transpose, and so on up to a tensor that is no transpose."""
    chain = [weight]
    while chain[-1].op != "placeholder" and _is_transpose(chain[-1]):
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    return chain


def _is_transpose(node: Node) -> bool:
    call = call_of(node)
    return (call is not None and call.kind == "transpose") or transpose_of(node) is not None


def dim_before(node: Node, dim: int, dims: int) -> int:
    """Return the dimension before a transpose of what is dimension `dim` after it."""
    call = call_of(node)
    one, other = (call["dim0"] % dims, call["dim1"] % dims) if call is not None else (dims - 2, dims - 1)
    swapped: dict[Any, int] = {one: other, other: one}
    return swapped.get(dim, dim)


def weight_product(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of `linear`, `addmm`, and products of groups of rows with experts."""
    product = product_of(node, values)
    if product is None:
        return Refusal("a product that cannot be read")
    held, weight = values.slice_of(product.x), values.slice_of(product.weight)
    last = len(values.shape_of(product.x)) - 1
    if weight is None:
        return _whole_weight(product, held, values)
    if weight.dim == product.inputs:
        return _row(node, product, held, weight, last)
    if weight.dim != product.outputs or held is not None:
        return Refusal(_UNLIKE)
    out = Slice(len(values.shape_of(node)) - 1, weight.parts)
    is_sliced = values.slice_of(product.bias) is not None
    if is_sliced and values.slice_of(product.bias) != Slice(0, weight.parts):
        return Refusal(_UNLIKE)
    takes = {product.bias: Slice(0, weight.parts)} if isinstance(product.bias, Node) and not is_sliced else {}
    return Outcome(out, takes)


def _whole_weight(product: Product, held: Slice, values: Values) -> Outcome | Refusal:
    last = len(values.shape_of(product.x)) - 1
    if held is None or values.slice_of(product.bias) is not None:
        return Refusal("a matmul of which only the bias is sharded")
    if held.dim == last:
        return Refusal("a matmul sums over the sharded dimension, with a replicated weight")
    return Outcome(held)


def _row(node: Node, product: Product, held: Any, weight: Slice, last: int) -> Outcome | Refusal:
    wanted = Slice(last, weight.parts)
    if held not in (None, wanted):
        return Refusal(_UNLIKE)
    takes = {product.x: wanted} if held is None else {}
    if not isinstance(product.bias, Node):
        return Outcome(None, takes, is_partial=True)
    args: tuple[Any, ...] = (product.x, product.weight)
    return Outcome(None, takes, args=args, kwargs={}, is_partial=True, added=product.bias)


def matmul(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of a product of two values: sliced in a leading dimension, rows or columns, or summed."""
    call = call_of(node)
    assert call is not None
    one, other = call.input, call["other"]
    shapes = values.shape_of(one), values.shape_of(other)
    if min(len(shape) for shape in shapes) < 2:
        return Refusal("a product with a vector")
    dims = max(len(shape) for shape in shapes)
    first, second = (
        _from_end(values.slice_of(each), len(shape)) for each, shape in zip((one, other), shapes, strict=True)
    )
    parts = (values.slice_of(one) or values.slice_of(other)).parts
    if any(held is not None and held.parts != parts for held in map(values.slice_of, (one, other))):
        return Refusal(_UNLIKE)
    if first == -1 and second in (-2, None):
        takes = {} if second is not None else {other: Slice(len(shapes[1]) - 2, parts)}
        return Outcome(None, takes, is_partial=True)
    if second == -2 and first is None:
        return Outcome(None, {one: Slice(len(shapes[0]) - 1, parts)}, is_partial=True)
    if first == -2 and second is None:
        return Outcome(Slice(dims - 2, parts))
    if second == -1 and first is None:
        return Outcome(Slice(dims - 1, parts))
    if first is not None and second is not None and first != second:
        return Refusal(_UNLIKE)
    at = first if first is not None else second
    assert at is not None
    if at >= -2:
        return Refusal(_UNLIKE)
    takes = {}
    for each, shape in zip((one, other), shapes, strict=True):
        if values.slice_of(each) is None and len(shape) >= -at and not same(shape[at], 1):
            takes[each] = Slice(len(shape) + at, parts)
    return Outcome(Slice(dims + at, parts), takes)


def _from_end(held: Slice | None, dims: int) -> int | None:
    return None if held is None else held.dim - dims


def batches(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of `baddbmm`, sliced by its batches: `[batch * heads, rows, columns]`."""
    names = ("input", "batch1", "batch2")
    call: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    operands: list[Node] = [call[name] for name in names]
    (held, *others) = {values.slice_of(operand) for operand in operands} - {None}
    if others or held.dim != 0 or any(len(values.shape_of(operand)) != 3 for operand in operands):
        return Refusal(_UNLIKE)
    whole = (operand for operand in operands if values.slice_of(operand) is None)
    return Outcome(held, {operand: held for operand in whole if not same(values.shape_of(operand)[0], 1)})


def attention(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of scaled dot-product attention, sliced by heads: `[batch, heads, time, width]`."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    call: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    operands: list[Node] = [call[name] for name in names[:3]]
    if call.get("dropout_p", 0):
        return Refusal("attention draws its dropout inside, other numbers for each slice of heads: set it to 0")
    held = [values.slice_of(operand) for operand in operands]
    heads = [values.shape_of(operand)[1] for operand in operands]
    wrong = tuple(each for each, one in zip(operands, held, strict=True) if one not in (None, Slice(1)))
    if len(values.shape_of(operands[0])) != 4 or wrong or held[0] is None:
        return Refusal("attention that is not sharded by heads", blamed=wrong)
    takes: dict[Node, Slice] = {}
    for operand, one, count in zip(operands, held, heads, strict=True):
        if one is None and count != 1:
            if count != heads[0]:
                return Refusal(
                    f"attention of {heads[0]} sharded heads with {count} replicated heads of keys and values"
                )
            takes[operand] = Slice(1)
    mask = call.get("attn_mask")
    if isinstance(mask, Node):
        shape = values.shape_of(mask)
        if len(shape) >= 3 and not same(shape[-3], 1):
            if values.slice_of(mask) is None:
                takes[mask] = Slice(len(shape) - 3)
        elif values.slice_of(mask) is not None:
            return Refusal("attention with a mask that is sharded in another way")
    return Outcome(Slice(1), takes)


PRODUCTS: Mapping[str, Callable[[Node, Values], Outcome | Refusal]] = MappingProxyType(
    {
        **dict.fromkeys(("linear", "addmm", "grouped_mm_fallback", "_grouped_mm", "grouped_mm"), weight_product),
        "matmul": matmul,
        "baddbmm": batches,
        "scaled_dot_product_attention": attention,
    }
)

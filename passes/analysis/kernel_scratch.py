"""Scratch memory: the bytes that a CPU kernel allocates and frees while it runs, besides its results.

Neither graphs nor schemas show it. Each bound was measured at torch's allocator (torch 2.13, oneDNN with AVX-512, one
and four threads):

    convolution     oneDNN reorders operands and result into layouts of its own; float64 is unfolded into columns
    matmul          oneDNN reorders operands of bfloat16 and float16; an operand without a stride of 1 is copied
    attention       a tile of scores for each thread
    upsampling      a contiguous copy of both sides; in the backward of the gradient
    dropout         its mask in the type of its operand
    losses          the loss of each element, before it is averaged
    pointwise       a copy of each operand that is converted to the compute type
    backwards       a contiguous copy of an expanded gradient
    repeated draws  the generator's own state, beside what the op itself uses
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dsgraph.passes.compat import OpOverload
from dsgraph.passes.ir.random_calls import random_call

from .sizes import UNKNOWN_SIZE, hint

aten = torch.ops.aten

_ROUNDING = 16  # channels of a block in oneDNN's layouts
_UNBLOCKED = 4  # most channels of a convolution that reads them in the plain layout
_SMALL = 2**14  # bytes that each kernel of oneDNN takes for any sizes
_SCALARS = 64  # bytes of the sums of a loss
_TILE, _KEY_TILE = 256, 512  # the largest tiles of attention, in queries and keys


def scratch_bytes(node: Node, *, fused: bool = False) -> int:
    """Return an upper bound of the bytes that a node's kernel uses besides its arguments and results.

    Args:
        node: A node with fake values. Nodes on other devices than the CPU count as 0.
        fused: True if Inductor compiles the graph: its own kernels use no scratch memory, library kernels do.
    """
    drawn, value = random_call(node), node.meta.get("val")
    if drawn is None:
        return _scratch(node, node.target, node.args, value, fused=fused)
    result = value[1] if drawn.returns_state and value is not None else value
    state = sum(map(_bytes, _read(drawn.state)))
    return state + _scratch(node, drawn.op, drawn.args, result, fused=False)  # Inductor calls it as well


def _scratch(node: Node, op: Any, args: Sequence[Any], value: Any, *, fused: bool) -> int:
    """Return the bound for an op that a node runs, with its arguments and its result."""
    results = _tensors(value)
    operands = [x for argument in args for x in _read(argument)]
    if not isinstance(op, OpOverload) or not results or any(x.device.type != "cpu" for x in results):
        return 0
    known = _EXTERNAL.get(op.overloadpacket)
    if known is not None:
        return known(node, operands, results)
    if fused:
        return 0
    known = _EAGER.get(op.overloadpacket)
    if known is not None:
        return known(node, operands, results)
    if torch.Tag.pointwise in op.tags and op not in _CONVERTING:
        return _converted(operands)
    return 0


def oversized_bytes(node: Node, *, fused: bool = False) -> int:
    """Return the bytes of a node's result beyond those of its elements.

    The mean of these losses is written to the first bytes of the losses of all elements.

    Args:
        node: See `scratch_bytes`.
        fused: See `scratch_bytes`.
    """
    if fused or not isinstance(node.target, OpOverload) or node.target.overloadpacket not in _IN_PLACE_MEANS:
        return 0
    (result,) = _tensors(node.meta["val"])
    operands = [x for argument in node.args for x in _read(argument)]
    return max(0, max(map(_bytes, operands)) - _bytes(result)) if result.device.type == "cpu" else 0


def _convolution(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    x, weight = operands[:2]
    columns = _columns(x, weight, results[0])
    size = _bytes(results[0])
    if node.args[6]:  # a transposed convolution
        return max(_blocked(x) + _blocked_weight(weight), 2 * size) + _SMALL + columns
    return max(_blocked(x) + _blocked_weight(weight), _blocked(results[0])) + _SMALL + columns


def _convolution_backward(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    gradient, x, weight = operands[:3]
    copies = _blocked(gradient) + _expanded(gradient) + _blocked(x)
    weights = (1 + torch.get_num_threads()) * max(_blocked_weight(weight), _elements(weight) * 4)
    strided = 4 * _bytes(x) // max(1, hint(x.shape[0], unknown=UNKNOWN_SIZE))
    return copies + weights + strided + _SMALL + _columns(x, weight, gradient)


def _columns(x: Tensor, weight: Tensor, result: Tensor) -> int:
    """Return the bytes of a float64 convolution, for which oneDNN has no kernels: one row per input window."""
    if x.dtype != torch.float64:
        return 0
    places = math.prod(hint(n, unknown=UNKNOWN_SIZE) for n in (result.shape[0], *result.shape[2:]))
    return places * math.prod(weight.shape[1:]) * x.element_size()


def _matmul(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    if results[0].dtype in (torch.bfloat16, torch.float16):
        return sum(map(_bytes, operands)) + sum(map(_bytes, results))
    return sum(_bytes(x) // _matrices(x) for x in operands if not _has_rows(x))


def _attention(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    query, key = operands[:2]
    return torch.get_num_threads() * _tile(query, key, tiles=1)


def _attention_backward(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Return the bytes of the tiles and of a gradient whose heads do not follow positions; only that one is copied."""
    gradient, query, key = operands[:3]
    return torch.get_num_threads() * _tile(query, key, tiles=2) + _expanded(gradient.transpose(1, 2))


def _tile(query: Tensor, key: Tensor, *, tiles: int) -> int:
    rows, columns = (hint(x.shape[2], unknown=UNKNOWN_SIZE) for x in (query, key))
    rows, columns, width = min(rows, _TILE), min(columns, _KEY_TILE), hint(query.shape[-1], unknown=UNKNOWN_SIZE)
    return 4 * rows * (tiles * columns + width + 2) + _SMALL


def _both_sides(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    return sum(map(_bytes, (*operands, *results)))


def _gradient(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    return _bytes(operands[0])


def _each_element(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    return max(map(_bytes, operands)) + _SCALARS


def _each_element_twice(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    return 2 * _each_element(node, operands, results)


def _group_sums(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Return the bytes of two sums for each image and channel."""
    sums = 2 * math.prod(hint(n, unknown=UNKNOWN_SIZE) for n in operands[1].shape[:2])
    return sums * operands[1].element_size() + _expanded_operands(node, operands, results)


def _mask(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    return _elements(results[0]) + 4 * _elements(results[0]) // max(1, results[0].shape[-1]) + _SMALL


def _expanded_operands(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    return sum(map(_expanded, operands))


def _sum(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Return the bytes of the operand converted to the type of the sum, if it differs."""
    differs = operands[0].dtype != results[0].dtype
    return _elements(operands[0]) * results[0].element_size() if differs else 0


_IN_PLACE_MEANS = (aten.mse_loss, aten.smooth_l1_loss)

Bound = Callable[[Node, Sequence[Tensor], Sequence[Tensor]], int]

_EXTERNAL: Mapping[Any, Bound] = {  # Inductor calls them as well
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _matmul),
}

_EAGER: Mapping[Any, Bound] = {
    **dict.fromkeys(
        (
            aten.upsample_bicubic2d,
            aten.upsample_bilinear2d,
            aten.upsample_linear1d,
            aten.upsample_nearest1d,
            aten.upsample_nearest2d,
        ),
        _both_sides,
    ),
    **dict.fromkeys(
        (
            aten.native_batch_norm_backward,
            aten.upsample_bicubic2d_backward,
            aten.upsample_bilinear2d_backward,
            aten.upsample_linear1d_backward,
            aten.upsample_nearest1d_backward,
            aten.upsample_nearest2d_backward,
        ),
        _gradient,
    ),
    **dict.fromkeys((*_IN_PLACE_MEANS, aten.huber_loss, aten.logsumexp, aten.native_dropout), _each_element),
    aten.binary_cross_entropy_with_logits: _each_element_twice,
    aten._safe_softmax: _mask,
    aten.native_group_norm_backward: _group_sums,
    **dict.fromkeys((aten.sum, aten.mean), _sum),
    **dict.fromkeys(
        (
            aten._adaptive_avg_pool2d_backward,
            aten._embedding_bag_backward,
            aten._log_softmax_backward_data,
            aten._softmax_backward_data,
            aten.adaptive_max_pool2d_backward,
            aten.avg_pool2d_backward,
            aten.col2im,
            aten.embedding_dense_backward,
            aten.gelu_backward,
            aten.grid_sampler_2d_backward,
            aten.im2col,
            aten.max_pool2d_with_indices_backward,
            aten.native_layer_norm_backward,
            aten.reflection_pad2d_backward,
        ),
        _expanded_operands,
    ),
}

# These ops read each operand in its own type.
_CONVERTING = {aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.copy.default}


def _converted(operands: Sequence[Tensor]) -> int:
    """Return the bytes of operands of a pointwise op that are converted to its compute type."""
    sized = [x for x in operands if x.dim()]
    if len({x.dtype for x in sized}) < 2:
        return 0
    common = reduce(torch.promote_types, (x.dtype for x in sized))
    return sum(_elements(x) * common.itemsize for x in sized if x.dtype != common)


def _expanded(value: Tensor) -> int:
    """Return the bytes of a contiguous copy, if one is made."""
    return 0 if value.is_contiguous() else _bytes(value)


def _has_rows(value: Tensor) -> bool:
    """Return True if a matrix is read without a copy: its rows or columns are contiguous."""
    if value.dim() < 2:
        return True
    rows, columns = value.stride()[-2:]
    return bool((columns == 1 and rows >= value.shape[-1]) or (rows == 1 and columns >= value.shape[-2]))


def _matrices(value: Tensor) -> int:
    return max(1, hint(value.shape[0], unknown=UNKNOWN_SIZE)) if value.dim() > 2 else 1


def _blocked(value: Tensor) -> int:
    """Return the bytes of images in oneDNN's blocked layout."""
    channels = hint(value.shape[1], unknown=UNKNOWN_SIZE)
    return _bytes(value) if channels <= _UNBLOCKED else _bytes(value) // channels * _rounded(channels)


def _blocked_weight(weight: Tensor) -> int:
    outward, inward, *window = weight.shape
    inward = inward if inward <= _UNBLOCKED else _rounded(inward)
    return _rounded(outward) * inward * math.prod(window) * weight.element_size()


def _rounded(channels: int) -> int:
    return -(-channels // _ROUNDING) * _ROUNDING


def _elements(value: Tensor) -> int:
    return math.prod(hint(n, unknown=UNKNOWN_SIZE) for n in value.shape)


def _bytes(value: Tensor) -> int:
    """Return the bytes of a contiguous copy."""
    return _elements(value) * value.element_size()


def _read(argument: Any) -> list[Tensor]:
    if isinstance(argument, (tuple, list)):
        return [x for item in argument for x in _read(item)]
    return _tensors(argument.meta.get("val")) if isinstance(argument, Node) else []


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [x for item in value for x in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []

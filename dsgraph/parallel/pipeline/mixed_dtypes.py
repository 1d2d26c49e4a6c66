"""Operators of a captured forward that torch refuses because `param_dtype` does not cast one of their operands.

Fake tensors do not show such an error. A step would raise it on one rank, while the others wait.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from dsgraph.passes.ir.blocks import module_of
from dsgraph.utils.errors import PartitionError

from .captured_model import CapturedModel

_PRODUCTS = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    }
)
"""Operators whose operands must have one dtype."""

_NORMS = frozenset({"layer_norm", "group_norm"})
"""Operators whose input must not have a wider dtype than their weights."""


def refuse_mixed_dtypes(captured: CapturedModel, dtype: torch.dtype) -> None:
    """Refuse a forward with such an operator. Under autocast, which casts operands, nothing is refused.

    Args:
        captured: The forward with parameters and inputs of this dtype.
        dtype: The argument `param_dtype`.

    Raises:
        PartitionError: Names the operator and the buffer or value of another dtype.
    """
    nodes = list(captured.graph_module.graph.nodes)
    devices = {node.meta["val"].device.type for node in nodes if isinstance(node.meta.get("val"), Tensor)}
    if any("autocast" in _name(node) for node in nodes) or any(map(torch.is_autocast_enabled, devices - {"meta"})):
        return
    for node in nodes:
        operands = [read for read in node.all_input_nodes if _dtype(read) is not None]
        if _name(node) in _NORMS:
            operands = operands if _dtype(operands[0]) != dtype else []
        elif _name(node) == "batch_norm":  # its input may be narrower than its statistics and weights
            operands = operands[1:]
        elif _name(node) == "scaled_dot_product_attention":  # a mask may be float32
            operands = [read for read in operands if read in node.args[:3]]
        elif _name(node) not in _PRODUCTS or (_name(node) == "einsum" and not _sums_products(str(node.args[0]))):
            continue
        others = [read for read in operands if _dtype(read) != dtype]
        if others and len(others) < len(operands):
            raise PartitionError(
                f"pipeline: {_name(node)} in {module_of(node) or 'the model'!r} gets {_dtype(others[0])} and {dtype}: "
                f"{_origin(others[0], captured)} is {_dtype(others[0])}, and param_dtype casts only parameters and "
                "inputs. Convert it in the forward, such as buffer.to(x.dtype)"
            )


def _sums_products(equation: str) -> bool:
    """Return True for an einsum that sums over an index of several operands; others multiply element by element."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    repeated = {index for index in operands if index.isalpha() and sum(index in one for one in operands.split(",")) > 1}
    return bool(repeated - set(result)) if arrow else bool(repeated)


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _dtype(node: Node) -> torch.dtype | None:
    """Return the dtype of a floating-point tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) and value.is_floating_point() else None


def _origin(node: Node, captured: CapturedModel) -> str:
    """Return the name of the buffer, or of the first value, that gave a node its dtype."""
    dtype, before = _dtype(node), [node]
    while before:
        node, before = before[0], [read for read in before[0].all_input_nodes if _dtype(read) == dtype]
    if node.name in captured.state:
        return f"buffer {captured.state[node.name][0]!r}"
    return f"the value {node.name!r} that the forward makes"

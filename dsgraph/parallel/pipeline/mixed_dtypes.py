"""Operators of a captured forward that torch refuses because `param_dtype` does not cast one of their operands.

Fake tensors do not show such an error. A step would raise it on one rank, while the others wait.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from dsgraph.passes.ir.blocks import module_of
from dsgraph.utils.errors import PartitionError

from .captured_model import CapturedModel

_ONE_DTYPE = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "cross", "cdist", "grid_sample"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("index_add", "index_copy", "index_put", "index_reduce", "embedding_bag", "nll_loss"),
    }
)
"""Operators whose floating-point operands must have one dtype."""

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
        operands = _compared(node, dtype)
        others = [read for read in operands if _dtype(read) != dtype]
        if others and len(others) < len(operands):
            raise PartitionError(
                f"pipeline: {_name(node)} in {module_of(node) or 'the model'!r} gets {_dtype(others[0])} and {dtype}: "
                f"{_origin(others[0], captured)} is {_dtype(others[0])}, and param_dtype casts only parameters and "
                "inputs. Convert it in the forward, such as buffer.to(x.dtype)"
            )


def _compared(node: Node, dtype: torch.dtype) -> list[Node]:
    """Return the floating-point operands that must have one dtype; empty if the operator takes any."""
    name = _name(node).removesuffix("_")
    operands = [read for read in node.all_input_nodes if _dtype(read) is not None]
    if name in _ONE_DTYPE or (name == "einsum" and _sums_products(str(node.args[0]))):
        return operands
    if name in _NORMS:
        return operands if _dtype(operands[0]) != dtype else []
    if name == "batch_norm":  # its input may be narrower than its statistics and weights
        return operands[1:]
    if name == "scaled_dot_product_attention":  # a mask may be float32
        return [read for read in operands if read in _first(node, "query", "key", "value")]
    if name in ("cross_entropy", "cross_entropy_loss"):  # with probabilities as targets any dtypes
        return operands if _first(node, "input", "target")[1] not in operands else []
    if name == "binary_cross_entropy":  # weights are cast
        return [read for read in operands if read in _first(node, "input", "target")]
    if name == "setitem" and _indexes_by_tensor(node.args[1]):  # a single value is cast
        return [read for read in operands if read.meta["val"].dim() > 0]
    return []


def _first(node: Node, *names: str) -> list[Argument]:
    """Return the first arguments of a call, which may be positional or have these names."""
    return [
        node.args[number] if number < len(node.args) else node.kwargs.get(name) for number, name in enumerate(names)
    ]


def _indexes_by_tensor(index: Argument) -> bool:
    """Return True for an index with a tensor or a list: it writes by `index_put`, any other by `copy`, which casts."""
    parts = index if isinstance(index, tuple) else (index,)
    values = [part.meta.get("val") if isinstance(part, Node) else part for part in parts]
    return any(isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0) for value in values)


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

"""Recognition of a language model's head: from the input of a loss back to the product of hidden states and weight."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from dsgraph.inductor_ext.kernels.launch import wide_dtype
from dsgraph.inductor_ext.symbolic_sizes import same_size

from .matching import Call, call_of, dtype_of, either_way, is_call, number_of, split_index, transpose_of, value_of
from .spec import Derived, NearMiss


def has_head(logits: object) -> bool:
    """Return whether a linear layer computes the logits, found among values with as many columns as classes."""
    value = value_of(logits)
    if value is None or value.ndim == 0:
        return False
    classes = value.shape[1 if value.ndim > 1 else 0]
    frontier, seen = [logits], set()
    while frontier:
        node = frontier.pop()
        if is_call(node, "linear", "matmul"):
            return True
        made = value_of(node)
        if node is not logits and (made is None or made.ndim == 0 or not same_size(made.shape[-1], classes)):
            continue
        assert isinstance(node, Node)
        frontier += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    return False


@dataclass
class Path:
    """The calls between the loss and the head, collected from the loss on; at the head they become arguments.

    Attributes:
        reader: The reader of the next node.
        rows: Indices of rows and classes, last first, with the number of dimensions that they apply to; None for a
            reshape to one dimension of rows.
        scale: The factor of logits before a soft cap.
        softcap: The cap, once its `tanh` has been met.
        dtypes: The dtypes to which logits are cast.
    """

    reader: Node
    rows: list[tuple[Any, int]] = field(default_factory=list)
    scale: float = 1.0
    softcap: float | None = None
    dtypes: list[torch.dtype | None] = field(default_factory=list)
    hidden: Any = None
    weight: Any = None
    bias: Any = None


def with_classes_last(logits: Any, path: Path) -> Any:
    """Return the logits `[..., classes]`: the loss's input itself, or `[N, classes, rows]` before its transpose."""
    value = value_of(logits)
    assert value is not None
    if value.ndim <= 2:
        return logits
    call = call_of(logits)
    swaps = call is not None and call.kind == "transpose" and {call["dim0"] % 3, call["dim1"] % 3} == {1, 2}
    permutes = logits.target == "permute" and logits.args[1:] in ((0, 2, 1), ((0, 2, 1),))
    if value.ndim != 3 or not (swaps or permutes):
        return None
    if _read_elsewhere(logits, path.reader) is None:
        path.reader = logits
        return logits.args[0]
    return logits  # which `follow` refuses


def follow(node: Node, path: Path) -> NearMiss | None:
    """Follow the calls from `node` to the head; return why it is impossible, or None."""
    while True:
        reason = _read_elsewhere(node, path.reader)
        if reason is not None:
            return NearMiss(node, reason)
        call = call_of(node)
        if call is None:
            return NearMiss(node, f"{node.name} stands between the head and the loss")
        if call.kind in ("linear", "matmul") or _bias_of(call) is not None:
            return _end(node, call, path)
        source = _step(node, call, path)
        if isinstance(source, str):
            return NearMiss(node, source)
        path.reader, node = node, source


def _read_elsewhere(node: Node, reader: Node) -> str | None:
    """Return the reader of the logits besides the loss, which needs them in memory; None if there is none."""
    other = next((user for user in node.users if user is not reader), None)
    if other is None:
        return None
    if other.op == "output":
        return "the graph returns the logits as well: compile a function that returns the loss alone"
    return f"the logits are read by {other.name} as well"


def _step(node: Node, call: Call, path: Path) -> Node | str:
    """Return the input of `node`, with its effect noted in `path`; or why it does not belong there."""
    if call.kind == "cast":
        path.dtypes.append(dtype_of(node))
    elif call.kind == "reshape":
        return _reshape(node, call, path)
    elif call.kind == "getitem":
        before = value_of(call.input)
        if before is None:
            return f"nothing is known of what {node.name} picks from"
        path.rows.append((call["index"], before.ndim))
    elif call.kind == "tanh":
        if path.softcap is not None:
            return "its logits are capped twice"
        path.softcap = path.scale  # its sign goes to the scale: tanh is odd
    elif call.kind in ("mul", "div"):
        return _factor(call, path)
    elif call.kind != "contiguous":
        return f"{node.name} stands between the head and the loss"
    source = call.input
    return source if isinstance(source, Node) else f"{node.name} has no input"


def _factor(call: Call, path: Path) -> Node | str:
    pairs = either_way(call) if call.kind == "mul" else [(call.input, call["other"])]
    for source, other in pairs:
        factor = number_of(other)
        if isinstance(source, Node) and factor is not None and call.arguments.get("rounding_mode") is None:
            path.scale = path.scale * factor if call.kind == "mul" else path.scale / factor
            return source
    return f"its logits are scaled by {call['other']}, which is no number"


def _reshape(node: Node, call: Call, path: Path) -> Node | str:
    before, after = value_of(call.input), value_of(node)
    if before is None or after is None or not same_size(before.shape[-1], after.shape[-1]):
        return "its logits are reshaped across classes"
    if path.rows:  # rows of its result are selected
        if after.ndim != 2:
            return "its rows are rearranged before some of them are picked"
        path.rows.append((None, before.ndim))
    assert isinstance(call.input, Node)
    return call.input


def _bias_of(call: Call) -> tuple[Any, Any] | None:
    """Return `h @ w.t() + b` as the product and b; None for other calls."""
    if call.kind == "add":
        for product, bias in either_way(call):
            value = value_of(bias)
            if value is not None and value.ndim == 1 and _bare_head(product) is not None:
                return product, bias
    return None


def _bare_head(node: Any) -> Call | None:
    call = call_of(node)
    if call is None or call.kind not in ("linear", "matmul") or call.arguments.get("bias") is not None:
        return None
    return call


def _end(node: Node, call: Call, path: Path) -> NearMiss | None:
    """Turn the head and the calls before the loss into the op's arguments."""
    added = _bias_of(call)
    if added is not None:
        product, path.bias = added
        reason = _read_elsewhere(product, node)
        if reason is not None:
            return NearMiss(product, reason)
        if dtype_of(product) != dtype_of(node):
            return NearMiss(node, f"its bias is {dtype_of(path.bias)} and the product {dtype_of(product)}")
        head = call_of(product)
        assert head is not None
    else:
        head, path.bias = call, call.arguments.get("bias")
    path.hidden = head.input
    path.weight = head["weight"] if head.kind == "linear" else _transposed(head["other"])
    computed = dtype_of(node)
    if path.weight is None or computed is None:
        return NearMiss(node, "its head is no product with one matrix")
    if any(dtype not in (computed, wide_dtype(computed)) for dtype in path.dtypes):
        return NearMiss(node, f"its logits are cast from {computed} to {path.dtypes}; the kernel computes in float32")
    for name in ("hidden", "weight", "bias"):  # as autocast would
        value = getattr(path, name)
        if isinstance(value, Node) and dtype_of(value) != computed:
            setattr(path, name, Derived("to", (value, computed)))
    if path.softcap is not None:
        path.softcap = abs(path.softcap)
    return _pick(node, path)


def _transposed(matrix: Any) -> Node | Derived | None:
    value = value_of(matrix)
    if value is None or value.ndim != 2:
        return None
    source = transpose_of(matrix)
    return Derived("t", (matrix,)) if source is None else source


def _pick(head: Node, path: Path) -> NearMiss | None:
    """Apply the selection of logits' rows to hidden states, and that of classes to weight and bias."""
    for index, dims in reversed(path.rows):
        if index is None:
            path.hidden = Derived("flatten", (path.hidden, 0, -2))
            continue
        split = split_index(index, dims)
        if split is None:
            return NearMiss(head, f"its classes are indexed with {index}")
        rows, stop = split
        if any(item is not Ellipsis and item != slice(None) for item in rows):
            path.hidden = Derived(operator.getitem, (path.hidden, rows))
        if stop is not None:
            classes = slice(None, stop)
            path.weight = Derived(operator.getitem, (path.weight, classes))
            path.bias = None if path.bias is None else Derived(operator.getitem, (path.bias, classes))
    return None

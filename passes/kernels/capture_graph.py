"""Properties of the graph that Dynamo captured: torch functions, some of which write to their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from dsgraph.inductor_ext.symbolic_sizes import same_shape, same_size
from dsgraph.passes.compat import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    schema_of,
    set_grad_enabled,
    storage_id,
)

from .matching import call_of, fake_of, writes

# Reading these again costs almost nothing: they stay for their other readers, without a note.
_CHEAP = ("cast", "contiguous", "reshape", "transpose", "getitem", "unflatten", "chunk", "split")

# Calls that may fail, or mean something else, if a tensor has other strides; and those whose result may have the
# strides of an argument though it has another shape, as the argument is broadcast.
_READING_LAYOUT = ("view", "view_as", "as_strided", "stride", "is_contiguous")
_POINTWISE = ("cast", "add", "sub", "mul", "div", "neg", "dropout", "silu", "gelu", "where", "masked_fill", "softmax")
# Calls whose derivative reads nothing, or their result.
_KEEPING_NO_INPUT = ("add", "sub", "softmax", "dropout", "exp", "tanh", "sigmoid", "sqrt", "rsqrt")
_READING_MODULES = ("torch", "_operator", "operator", "builtins", "math")


def interior(node: Node, inputs: Sequence[Node]) -> list[Node]:
    """Return the nodes that compute `node` from `inputs`, in program order, `node` last, without inputs and sizes."""
    seen = {node}
    frontier = [node]
    while frontier:
        for argument in frontier.pop().all_input_nodes:
            if argument not in seen and argument not in inputs and not _is_size(argument):
                seen.add(argument)
                frontier.append(argument)
    return sorted(seen)


def _computed_from(inputs: Sequence[Node], inside: Sequence[Node]) -> set[Node]:
    """Return the nodes of `inside`, which is in program order, that depend on an input."""
    found = set(inputs)
    for item in inside:
        if not found.isdisjoint(item.all_input_nodes):
            found.add(item)
    return found


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), (int, torch.SymInt))


def why_unsafe(node: Node, inputs: Sequence[Node], *, others: Sequence[Node] = ()) -> str | None:
    """Return why the computation of `node` from `inputs` must not move to `place_of`; None if it may.

    `others` are intermediate results that the kernel returns as well: their readers read the kernel's results.
    """
    inside = interior(node, inputs)
    first, computed = inside[0], _computed_from(inputs, inside)
    if any(item.op in ("placeholder", "get_attr") for item in inside):
        return f"it also reads {first.name}"
    for item in inside:
        outside = next((user for user in item.users if user not in inside), None)
        if item is node or item in others or outside is None or item not in computed:
            continue  # values such as masks, which depend on no input, stay for their other readers
        call = call_of(item)
        if call is None or call.kind not in _CHEAP:
            return f"{item.name}, which it computes on the way, is read by {outside.name} as well"
    read = {storage for item in (*inputs, *inside) for storage in _storages(item)}
    between = first
    while between is not node:
        reason = _disturbs(between, read)
        if reason is not None:
            return reason
        between = between.next
    return (
        _disturbs(node, set())
        or _why_nowhere(node, inputs, others=others)
        or _why_not_kept(node, inputs, others=others)
    )


def place_of(node: Node, inputs: Sequence[Node], *, others: Sequence[Node] = ()) -> Node:
    """Return the node before which `node` and `others` are computed together: their first reader, or `node`."""
    inside = interior(node, inputs)
    stays: set[Node] = set()
    for item in reversed(inside):
        if item is not node and item not in others and any(user not in inside or user in stays for user in item.users):
            stays.add(item)
    readers = (user for item in others for user in item.users if user not in inside or user in stays)
    return min((node, *readers))


def _why_nowhere(node: Node, inputs: Sequence[Node], *, others: Sequence[Node]) -> str | None:
    """Return why there is no place after all inputs and before all readers; None if there is."""
    inside, place = interior(node, inputs), place_of(node, inputs, others=others)
    for item in others:
        if item not in inside:
            return f"{item.name} is not computed on the way from what it reads"
    late = next((item for item in inputs if not item < place), None)
    return None if late is None else f"{place.name} reads what it computes before {late.name}, which it reads, is there"


def _why_not_kept(node: Node, inputs: Sequence[Node], *, others: Sequence[Node]) -> str | None:
    """Return why the inputs of a kernel must not be saved for its backward; None if they may.

    If the original graph saves them as well, autograd refuses that too, and nothing is lost.
    """
    if not any(value.requires_grad for value in _tensors(node)):
        return None
    inside = interior(node, inputs)
    for item in (*inputs, *others):
        readers = [user for user in item.users if user in inside]
        if not readers or not all(_keeps_nothing_of(item, user) for user in readers):
            continue
        for view in _views_of_one_memory(item):
            for user in view.users:
                if node < user and view in (_written(user) or ()):
                    return (
                        f"{user.name} writes later to what the kernel may keep for its backward and the graph does not"
                    )
    return None


def _views_of_one_memory(node: Node) -> set[Node]:
    """Return a node, the tensor that it is a view of, and the views of both, as far as the graph shows them."""
    storages, frontier, seen = _storages(node), [node], {node}
    while frontier:
        item = frontier.pop()
        for near in (*item.all_input_nodes, *item.users):
            if near not in seen and not storages.isdisjoint(_storages(near)):
                seen.add(near)
                frontier.append(near)
    return seen


def _keeps_nothing_of(item: Node, reader: Node) -> bool:
    """Return whether the derivative of an item's reader does not need the item."""
    call = call_of(reader)
    if call is None:
        return False
    return call.kind in _KEEPING_NO_INPUT or (call.kind == "cast" and _storages(reader).isdisjoint(_storages(item)))


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are known to have the same shape, and strides in dimensions of more than one row."""
    if not same_shape(one, other):
        return False
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(same_size(size, 1) or same_size(mine, theirs) for size, mine, theirs in strides)


def reader_of_layout(node: Node) -> Node | None:
    """Return a node that depends on the strides of `node`, of a view of it, or of a result with its layout."""
    frontier, seen = [node], {node}
    while frontier:
        item = frontier.pop()
        for user in item.users:
            if getattr(user.target, "__name__", user.target) in _READING_LAYOUT:
                return user
            if user not in seen and _takes_layout_over(user, item):
                seen.add(user)
                frontier.append(user)
    return None


def _takes_layout_over(node: Node, source: Node) -> bool:
    """Return whether a node is a view of its argument, or may get its memory layout from it."""
    call = call_of(node)
    if call is not None and call.kind == "contiguous":
        return False
    if not _storages(node).isdisjoint(_storages(source)) or (call is not None and call.kind in _POINTWISE):
        return True
    return any(same_layout(made, given) for made in _tensors(node) for given in _tensors(source))


def transforms_begun(node: Node) -> int:
    """Return 1 if a transform of `torch.func` (`vmap`, `grad`, ...) begins at a node, -1 if one ends, otherwise 0."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def _disturbs(node: Node, storages: set[int]) -> str | None:
    """Return why no reader of `storages` may move across a node, or None."""
    if node.target is set_grad_enabled:
        return "gradients are switched on or off inside it"
    name = getattr(node.target, "__name__", "")
    if node.op == "call_function" and (name.startswith(("_enter_", "_exit_")) or transforms_begun(node)):
        return f"a context begins or ends inside it ({name})"
    written = _written(node)
    if written is None:
        return f"{node.name} inside it may write to what it reads"
    if any(not storages.isdisjoint(_storages(item)) for item in written):
        return f"{node.name} writes to what it reads before it is through"
    return None


def _written(node: Node) -> list[Node] | None:
    """Return the nodes that a node writes to; None if unknown."""
    if node.op not in ("call_function", "call_method"):
        return []
    target: Any = node.target
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, OpOverload):
        return list(node.all_input_nodes) if schema_of(target).is_mutable else []
    if isinstance(target, HigherOrderOperator):
        return None
    if writes(node):
        return list(node.all_input_nodes)
    if isinstance(target, str) or (getattr(target, "__module__", None) or "torch").startswith(_READING_MODULES):
        return []
    return None


def _storages(node: Node) -> set[int]:
    return {storage_id(item) for item in _tensors(node) if item.layout is torch.strided}


def _tensors(node: Node) -> list[torch.Tensor]:
    value = fake_of(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in values if isinstance(item, torch.Tensor)]

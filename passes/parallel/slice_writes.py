"""Rules for values that a graph writes to: only a new tensor that is filled by copies can be sliced.

A call that does not support slices gets gathered copies of its operands, and a write to such a copy would be lost. So a
value that is written to later, itself or through a view, is replicated from its creation on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from torch.fx import Node

from dsgraph.passes.kernels.matching import writes

from .slices import Outcome, Refusal, Slice, Values, name_of, only_slice

# Calls whose result may share the memory of their first argument.
_VIEWS = (
    *("getitem", "getattr", "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "swapaxes"),
    *("permute", "t", "expand", "broadcast_to", "split", "chunk", "unbind", "narrow", "select", "detach", "contiguous"),
    *("to", "float", "half", "bfloat16", "double", "type", "type_as", "view_as", "view_as_real", "view_as_complex"),
    *("movedim", "moveaxis", "swapdims", "ravel", "adjoint", "mT", "mH", "diagonal", "unfold", "alias", "expand_as"),
    *("reshape_as", "tensor_split", "hsplit", "vsplit", "dsplit", "split_with_sizes", "real", "imag"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),  # in evaluation
)


def refuse_writes(node: Node, values: Values) -> Refusal | None:
    """Return why a call whose result is written to cannot make slices; None if nothing writes to it, or it can."""
    writers = list(_writers(node))
    if not writers or (name_of(memory_of(node)) == "new_empty" and values.slice_of(memory_of(node)) is not None):
        return None
    reason = f"{name_of(writers[0])} writes to it"
    if name_of(node) != "new_empty" or not _is_filled(node, writers, values):
        return Refusal(reason)
    allowed = (None, only_slice(node, values))
    sources = (writer.args[1] for writer in writers)
    wrong = tuple(each for each in sources if isinstance(each, Node) and values.slice_of(each) not in allowed)
    return Refusal(reason, blamed=wrong) if wrong else None


def _writers(node: Node) -> Iterator[Node]:
    """Yield the calls that write to a value, itself or through views."""
    for user in node.users:
        if writes(user) and node in (*user.args[:1], user.kwargs.get("input"), user.kwargs.get("out")):
            yield user
        elif name_of(user) in _VIEWS:
            yield from _writers(user)


def memory_of(node: Node) -> Node:
    """Return the value whose memory a view shows."""
    while name_of(node) in _VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _is_filled(node: Node, writers: list[Node], values: Values) -> bool:
    """Return True if copies to whole slices write all, from values that are known, before anything else reads it."""
    for writer in writers:
        view, source = writer.args[0], writer.args[1] if len(writer.args) == 2 else None
        if name_of(writer) != "copy_" or not isinstance(view, Node) or not isinstance(source, Node):
            return False
        shape, sizes = values.shape_of(source), values.shape_of(view)
        if name_of(view) != "getitem" or view.args[0] is not node or not source < node:
            return False
        if len(sizes) != len(values.shape_of(node)) or shape != sizes:
            return False
    filled = [writer.args[0] for writer in writers]
    return all(user in filled or user > max(writers) for user in node.users)


def _new_tensor(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of a new tensor that has the sliced dimension of the tensor from which it takes its dtype."""
    held, source = only_slice(node, values), values.shape_of(node.args[0])
    sizes = list(node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:])
    if len(sizes) != len(source) or sizes[held.dim] != source[held.dim]:
        return Refusal("a new tensor without the sharded dimension")
    sizes[held.dim] = source[held.dim] // values.ranks
    return Outcome(held, args=(node.args[0], sizes))


def _copy(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of a copy into a new tensor that is sliced: see `_is_filled`."""
    view, source = node.args[:2]
    held = values.slice_of(view)
    if not isinstance(held, Slice) or not isinstance(source, Node):
        return Refusal("copy_ writes to it")
    return Outcome(held, {source: held} if values.slice_of(source) is None else {})


WRITES: Mapping[str, Callable[[Node, Values], Outcome | Refusal]] = MappingProxyType(
    {"new_empty": _new_tensor, "copy_": _copy}
)

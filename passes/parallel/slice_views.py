"""Rules for calls that only arrange values, with sliced operands: views, indices, expansions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from dsgraph.passes.kernels.matching import call_of

from .slices import Outcome, Refusal, Slice, Values, name_of, only_slice, sizes_of, through_reshape


def transpose(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of every spelling of a transpose of two dimensions."""
    held, dims = only_slice(node, values), len(values.shape_of(node))
    call = call_of(node)
    first, second = (call["dim0"] % dims, call["dim1"] % dims) if call is not None else (dims - 2, dims - 1)
    swapped = {first: second, second: first}
    return Outcome(Slice(swapped.get(held.dim, held.dim), held.parts))


def _permute(node: Node, values: Values) -> Outcome | Refusal:
    held, order = only_slice(node, values), sizes_of(node)
    assert order is not None
    return Outcome(Slice([dim % len(order) for dim in order].index(held.dim), held.parts))


def _reshape(node: Node, values: Values) -> Outcome | Refusal:
    held, source = only_slice(node, values), node.args[0]
    after = values.shape_of(node)
    found = through_reshape(values.shape_of(source), after, held, values.ranks)
    if isinstance(found, Refusal) or name_of(node) not in ("view", "reshape"):
        return found if isinstance(found, Refusal) else Outcome(found)
    return _with_local_size(node, found, values)


def _expand(node: Node, values: Values) -> Outcome | Refusal:
    held = only_slice(node, values)
    moved = Slice(held.dim + len(values.shape_of(node)) - len(values.shape_of(node.args[0])), held.parts)
    return _with_local_size(node, moved, values)


def _with_local_size(node: Node, held: Slice, values: Values) -> Outcome | Refusal:
    """Return the call with the size of the sliced dimension, if it is an argument, divided by the ranks."""
    sizes = sizes_of(node)
    if sizes is None:
        return Refusal(f"{name_of(node)} whose sizes cannot be read")
    size = sizes[held.dim]
    if not isinstance(size, int):
        return Refusal(f"{name_of(node)} whose size of the sharded dimension is not fixed")
    if size != -1:
        sizes[held.dim] = size // values.ranks
    return Outcome(held, args=(node.args[0], tuple(sizes)), kwargs={})


def _is_list_of_numbers(item: object) -> bool:
    return isinstance(item, list) and all(isinstance(number, int) and not isinstance(number, bool) for number in item)


def _getitem(node: Node, values: Values) -> Outcome | Refusal:
    source, index = node.args[0], node.args[1]
    held = values.slice_of(source)
    if isinstance(held, tuple):
        assert isinstance(index, int)
        return Outcome(held[index])
    if not isinstance(held, Slice):
        return Refusal("an index that is sharded")
    items: Sequence[Any] = index if isinstance(index, tuple) else (index,)
    picks = [item for item in items if not (item is None or item is Ellipsis or isinstance(item, (int, slice)))]
    # One list keeps its dimension in place, unless numbers stand beside it.
    if picks and (len(picks) > 1 or not _is_list_of_numbers(picks[0]) or any(isinstance(item, int) for item in items)):
        return Refusal("an index that picks elements")
    dims = len(values.shape_of(source))
    taken = sum(item is not None and item is not Ellipsis for item in items)
    full = [each for item in items for each in ([slice(None)] * (dims - taken) if item is Ellipsis else [item])]
    at, out = 0, 0
    for number, item in enumerate(full):
        if item is not None and at == held.dim:
            return _of_pieces(node, full, number, Slice(out, held.parts), values)
        at += item is not None
        out += not isinstance(item, int) or isinstance(item, bool)
    return Outcome(Slice(held.dim - at + out, held.parts))


def _of_pieces(node: Node, items: list[Any], at: int, held: Slice, values: Values) -> Outcome | Refusal:
    """Apply the rule of an index into the sliced dimension: it may take all of it, or one of its pieces."""
    source, item = node.args[0], items[at]
    size = values.shape_of(source)[values.slice_of(source).dim]
    reason, bounds = "an index into its slices", (getattr(item, "start", ""), getattr(item, "stop", ""), size)
    if getattr(item, "step", None) not in (None, 1) or not all(isinstance(each, (int, type(None))) for each in bounds):
        return Refusal(reason)
    start, stop, _ = item.indices(size)
    taken, piece = stop - start, size // held.parts

    def own(first: int | None, last: int | None) -> tuple[Any, ...]:
        return source, (*items[:at], slice(first, last), *items[at + 1 :])

    if taken == size:
        return Outcome(held, args=own(None, None))
    if held.parts == 1 and taken > 0 and size % taken == 0 and start % taken == 0 and taken % values.ranks == 0:
        return Refusal(reason, parts=size // taken)
    if taken != piece or start % piece:
        return Refusal(reason)
    return Outcome(Slice(held.dim), args=own(start // values.ranks, stop // values.ranks))


def _pairs(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of views of pairs of numbers as complex numbers, or the other way round."""
    held = only_slice(node, values)
    if held.dim == len(values.shape_of(node)):
        return Refusal(f"{name_of(node)} of pairs that are sharded")
    return Outcome(held)


VIEWS: Mapping[str, Callable[[Node, Values], Outcome | Refusal]] = MappingProxyType(
    {
        "transpose": transpose,
        "permute": _permute,
        "reshape": _reshape,
        "view": _reshape,
        **dict.fromkeys(("expand", "broadcast_to"), _expand),
        "getitem": _getitem,
        **dict.fromkeys(("view_as_complex", "view_as_real"), _pairs),
    }
)

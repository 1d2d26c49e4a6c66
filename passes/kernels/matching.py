"""Reading of captured graphs: one name and one set of arguments for each way to spell a call.

A graph that Dynamo captured contains the user's calls: `x * y`, `torch.mul(x, y)`, `x.mul(y)`. `call_of` reads all of
them as `mul(input, other)`, so that a pattern is written once. Nothing that changes a result is dropped: a cast is a
call, an `alpha` is an argument. Calls that write to their arguments are not read.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .spellings import ALIASES, CASTS, KEYWORD_OPERATORS, KINDS, RESHAPES, SIGNATURES, WRITING_OPERATORS

# Dtypes whose values float32 represents without rounding.
FIT_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)

_REQUIRED = object()


@dataclass(frozen=True)
class Call:
    """A call under its canonical name.

    Attributes:
        kind: Its name: "mul", "mean", "linear", ...
        arguments: Its arguments by name, defaults filled in.
    """

    kind: str
    arguments: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def input(self) -> Any:
        """The first argument, usually the tensor that the call works on."""
        return next(iter(self.arguments.values()))


def call_of(node: object) -> Call | None:
    """Return the call of a node; None if it is no call, is unknown, or writes to an argument.

    Besides the names of `SIGNATURES`: "cast" (input; another dtype, nothing else), "contiguous" (input), "reshape" and
    "expand" (input; the new shape is that of the node's value).
    """
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    if node.target in CASTS:
        return _cast(node)
    if node.target in RESHAPES:
        is_reshape = bool(node.args) and dtype_of(node.args[0]) == dtype_of(node)  # not `x.view(torch.int32)`
        return Call("reshape", {"input": node.args[0]}) if is_reshape else None
    if node.target == "expand":
        return Call("expand", {"input": node.args[0]})
    if node.target == "contiguous":
        return Call("contiguous", {"input": node.args[0]}) if len(node.args) == 1 and not node.kwargs else None
    kind = KINDS.get(node.target)
    return _bind(kind, node) if kind is not None else None


def is_call(node: object, *kinds: str) -> bool:
    """Return whether a node calls one of `kinds`."""
    kind = KINDS.get(node.target) if isinstance(node, Node) else None
    if kind is not None and kind not in kinds and kind != "softmax_method":
        return False  # its arguments are not looked at
    call = call_of(node)
    return call is not None and call.kind in kinds


def writes(node: Node) -> bool:
    """Return whether a call writes to an argument by its name or arguments.

    `add_`, `+=`, `out=` and `inplace=True` do, also by position.
    """
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.target in WRITING_OPERATORS or name == "__setitem__":
        return True
    if name.endswith("_") and not name.endswith("__") and node.target not in KEYWORD_OPERATORS:
        return True
    return node.kwargs.get("out") is not None or bool(node.kwargs.get("inplace")) or _is_in_place_by_position(node)


def _is_in_place_by_position(node: Node) -> bool:
    if isinstance(node.target, str) or True not in node.args:
        return False
    try:
        parameters = list(inspect.signature(node.target).parameters)
    except (TypeError, ValueError):
        return False
    return "inplace" in parameters and len(node.args) > (at := parameters.index("inplace")) and bool(node.args[at])


def either_way(call: Call) -> Iterator[tuple[Any, Any]]:
    """Yield the two operands of a commutative call, in both orders; nothing for an addition that scales one of them."""
    if call.arguments.get("alpha", 1) == 1:
        first, second = call["input"], call["other"]
        yield first, second
        yield second, first


def value_of(node: object) -> Tensor | None:
    """Return the fake tensor of a node's result."""
    found = fake_of(node) if isinstance(node, Node) else None
    return found if isinstance(found, Tensor) else None


def fake_of(item: Any) -> Any:
    """Return the fake result of a node, which may be no tensor; return anything else as it is."""
    return item.meta.get("example_value", item.meta.get("val")) if isinstance(item, Node) else item


def dtype_of(node: object) -> torch.dtype | None:
    """Return the dtype of a node's result; None if it is no tensor."""
    value = value_of(node)
    return value.dtype if value is not None else None


def before_widening(node: Any) -> Any:
    """Return the node before a cast to float32, or the node: a kernel that computes in float32 may read either."""
    call = call_of(node)
    if call is None or call.kind != "cast":
        return node
    narrow, wide = dtype_of(call.input), dtype_of(node)
    return call.input if narrow == wide or (wide == torch.float32 and narrow in FIT_FLOAT32) else node


def with_narrowing(node: Node) -> Node:
    """Return the cast to a narrower float that alone reads a node, or the node: a kernel rounds to any dtype."""
    user, dtype = only_user(node), dtype_of(node)
    narrower = is_call(user, "cast") and dtype in (torch.float32, torch.float64) and dtype_of(user) in FIT_FLOAT32
    return user if narrower else node


def only_user(node: Node) -> Any:
    """Return the reader of a node, if there is only one; else None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def same_value(one: object, other: object) -> bool:
    """Return whether two nodes are the same, or the same cast, difference or mean of the same, written twice.

    Writes to their inputs in between are not considered here.
    """
    if one is other:
        return True
    first, second = call_of(one), call_of(other)
    if first is None or second is None or first.kind != second.kind or first.kind not in ("cast", "sub", "mean"):
        return False
    same = (
        same_value(mine, second[name]) if isinstance(mine, Node) else mine == second[name]
        for name, mine in first.arguments.items()
    )
    return dtype_of(one) == dtype_of(other) and all(same)


def is_last_dim(dim: object, value: Tensor) -> bool:
    """Return whether `dim`, a number or a sequence of one, is the last dimension of `value`."""
    if isinstance(dim, (tuple, list)):
        if len(dim) != 1:
            return False
        dim = dim[0]
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, value.ndim - 1)


def transpose_of(matrix: Node) -> Node | None:
    """Return the matrix whose transpose, as a view, a matrix is; None if it is none."""
    call = call_of(matrix)
    if call is not None:
        is_transpose = call.kind == "transpose" and {call["dim0"] % 2, call["dim1"] % 2} == {0, 1}
    elif matrix.op == "call_function":
        is_transpose = matrix.target is torch.t or (matrix.target is getattr and matrix.args[1] in ("T", "mT"))
    else:
        is_transpose = matrix.op == "call_method" and matrix.target == "t"
    source = matrix.args[0] if is_transpose else None
    return source if isinstance(source, Node) else None


def split_index(index: Any, dims: int) -> tuple[tuple[Any, ...], Any] | None:
    """Split the index of a tensor with `dims` dimensions into that of all but the last, and the cut of the last.

    Returns:
        An index that takes all of the last dimension, and the number of its first elements that the given index takes
            (None: all); None for an index that takes other elements, or adds a dimension.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is None or isinstance(item, list) for item in items):
        return None
    has_ellipsis = any(item is Ellipsis for item in items)
    if items[-1] is Ellipsis or not (has_ellipsis or sum(map(_dims_indexed, items)) >= dims):
        return tuple(items), None
    last = items[-1]
    if not isinstance(last, slice) or last.step not in (None, 1) or last.start not in (None, 0):
        return None
    return (*items[:-1], slice(None)), last.stop


def _dims_indexed(item: object) -> int:
    value = value_of(item)
    if item is Ellipsis:
        return 0
    return value.ndim if value is not None and value.dtype == torch.bool else 1


def number_of(argument: object) -> float | None:
    """Return a Python number as float; None for tensors and everything else."""
    is_number = isinstance(argument, (int, float)) and not isinstance(argument, bool)
    return float(argument) if is_number else None  # type: ignore[arg-type]


def _cast(node: Node) -> Call | None:
    """Return the call of `x.to(dtype)` and similar, unless they also move or copy."""
    source, made = value_of(node.args[0]) if node.args else None, value_of(node)
    if source is None or made is None or source.device != made.device or source.layout != made.layout:
        return None
    flags = [item for item in node.args[1:] if isinstance(item, bool)]  # non_blocking, copy
    if any(flags[1:]) or node.kwargs.get("copy") or node.kwargs.get("memory_format"):
        return None
    return Call("cast", {"input": node.args[0]})


def _bind(kind: str, node: Node) -> Call | None:
    names: list[str] = []
    bound: dict[str, Any] = {}
    for parameter in SIGNATURES[kind]:
        name, default = parameter if isinstance(parameter, tuple) else (parameter, _REQUIRED)
        names.append(name)
        bound[name] = default
    if len(node.args) > len(names) or set(node.kwargs) - set(names) - set(ALIASES):
        return None  # another overload, `out=`
    bound.update(zip(names, node.args, strict=False))
    bound.update({ALIASES.get(name, name): value for name, value in node.kwargs.items()})
    if set(bound) - set(names) or any(value is _REQUIRED for value in bound.values()) or bound.get("inplace"):
        return None
    return Call("softmax" if kind == "softmax_method" else kind, MappingProxyType(bound))

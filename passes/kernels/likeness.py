"""Patterns given as functions: they match where a captured graph makes the same calls as the function.

The function is traced without values, by torch.fx. A place of a graph matches if it makes the same calls with the same
numbers on any tensors: then it computes the same, whatever their shapes and dtypes. Spellings that `call_of` treats as
equal match, so do `x.square()` and `x ** 2`, and the orders of a sum and of a product; reshapes, copies, `and`, `or`
and `not` must be spelled the same.

The built-in kernels also name an anchor, the call or the parameter at which the search starts, and use a `Reading` for
parts with too many spellings, such as an optional cast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, get_origin

import torch
from torch import Tensor
from torch.fx import Graph, Node, Proxy

from .matching import Call, call_of, either_way, is_call, same_value, value_of, writes
from .spec import Match

_COMMUTATIVE = ("add", "mul")
# Calls that `call_of` treats as equal although sizes differ, or spellings that are only the same for booleans.
_AS_SPELLED = ("reshape", "expand", "contiguous", "not", "and", "or")
_Bound = Mapping[Node, Any]


class Reading:
    """A call in a pattern that matches whatever its function reads from a graph.

    The function takes a node and yields the arguments of the call, once for each way to read the node.
    """

    __name__: str

    def __init__(self, read: Callable[[Any], Iterator[tuple[Any, ...]]]) -> None:
        self.read = read
        update_wrapper(self, read)

    def reads(self, part: Node, node: Node) -> bool:
        """Return whether `part` is an argument of the call that a node represents."""
        return any(item is part for parts in self.read(node) for item in parts)

    def __call__(self, *args: Any) -> Any:
        tracer = next(item.tracer for item in args if isinstance(item, Proxy))
        return tracer.create_proxy("call_function", self, args, {})


@Reading
def cast(node: Any) -> Iterator[tuple[Any, ...]]:
    """Read `cast(x)`: x, cast to another dtype or not."""
    if is_call(node, "cast"):
        yield (node.args[0],)
    yield (node,)


@dataclass(frozen=True)
class Occurrence:
    """A match of a function: the node whose value the function returns, and the arguments by name."""

    end: Node
    arguments: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


@dataclass(frozen=True, repr=False)
class Likeness:
    """A pattern that matches a function.

    Attributes:
        kinds: Types of its parameters, in order: Tensor, the type of a number, or Any.
        calls: The nodes of the function, and their calls as `call_of` reads them.
        path: The nodes from the anchor to the last call.
        is_exact: True if a parameter that is read twice must be one node of a graph; otherwise it may be cast twice.
    """

    kinds: Mapping[str, Any]
    calls: Mapping[Node, Call | None]
    path: tuple[Node, ...]
    is_exact: bool

    @classmethod
    def of(cls, function: Callable[..., Tensor], *, anchor: str | None = None) -> Likeness:
        """Trace a function.

        Args:
            function: Plain torch. Its parameters are annotated as Tensor or as numbers; others may be anything.
            anchor: The kind of call, the reading or the parameter at which the search starts; default: the last call.

        Raises:
            ValueError: It cannot be traced without values, returns an argument, or not one tensor; a parameter is
                unused, or may be something other than a tensor or a number; it writes, or reads a tensor of its own.
        """
        signature = inspect.signature(function, eval_str=True)
        try:
            graph = torch.fx.symbolic_trace(function).graph
        except Exception as error:
            raise ValueError(f"it cannot be traced without values ({error})") from error
        kinds = {
            name: Any if item.annotation is item.empty else item.annotation
            for name, item in signature.parameters.items()
        }
        end = next(node for node in graph.nodes if node.op == "output").args[0]
        if not isinstance(end, Node) or end.op not in ("call_function", "call_method"):
            raise ValueError("it does not return the result of a call")
        reason = next(filter(None, map(_why_no_pattern, graph.nodes)), None) or _why_not_bound(kinds)
        if reason is not None:
            raise ValueError(reason)
        calls = {node: _call_of(node) for node in graph.nodes}
        return cls(kinds, calls, _path(graph, calls, end, anchor), is_exact=anchor is None)

    def is_anchor(self, node: Node) -> bool:
        """Return whether a node may be the function's anchor."""
        return self._may_be(self.path[0], node)

    def match(self, node: Node) -> Match | None:
        """Match the function with `node` as anchor; the inputs are the function's arguments."""
        found = next(self.find(node), None)
        return Match(found.end, tuple(found.arguments.values())) if found is not None else None

    def find(self, node: Any) -> Iterator[Occurrence]:
        """Yield all matches of the function with the anchor `node`."""
        anchor = self.path[0]
        is_one = isinstance(node, Node) and (anchor.op == "placeholder" or self._may_be(anchor, node))
        ends = [node] if is_one else []
        for mine in self.path[1:]:
            if isinstance(mine.target, Reading):
                ends = [*(user for end in ends for user in end.users if mine.target.reads(end, user)), *ends]
            else:
                ends = [user for end in ends for user in end.users if self._may_be(mine, user)]
        for end in dict.fromkeys(ends):
            for bound in self._bind(self.path[-1], end, {anchor: node}):
                found = {str(mine.target): theirs for mine, theirs in bound.items() if mine.op == "placeholder"}
                if set(found) == set(self.kinds):
                    yield Occurrence(end, {name: found[name] for name in self.kinds})

    def _may_be(self, mine: Node, theirs: Node) -> bool:
        if isinstance(mine.target, Reading):
            return next(mine.target.read(theirs), None) is not None
        one = self.calls[mine]
        if one is not None and one.kind != "pow":
            return is_call(theirs, one.kind)
        other = _call_of(theirs)
        if one is not None and other is not None:
            return one.kind == other.kind
        return mine.op == theirs.op and mine.target == theirs.target

    def _bind(self, mine: object, theirs: Any, bound: _Bound) -> Iterator[_Bound]:
        """Yield each extension of `bound` with which the two arguments match."""
        if isinstance(mine, Node):
            if mine.op == "placeholder":
                yield from self._bind_parameter(mine, theirs, bound)
            elif mine is not self.path[0] or theirs is bound[mine]:
                yield from self._bind_call(mine, theirs, bound)
        elif isinstance(mine, (tuple, list)):
            if isinstance(theirs, (tuple, list)):
                yield from self._bind_all(mine, theirs, bound)
        elif _is_same(mine, theirs):
            yield bound

    def _bind_parameter(self, mine: Node, theirs: Any, bound: _Bound) -> Iterator[_Bound]:
        if mine in bound:
            other = bound[mine]
            if other is theirs or _is_same(other, theirs) or (not self.is_exact and same_value(other, theirs)):
                yield bound
            return
        kind = self.kinds[str(mine.target)]
        if kind is Any or (value_of(theirs) is not None if kind is Tensor else type(theirs) is kind):
            yield {**bound, mine: theirs}

    def _bind_call(self, mine: Node, theirs: Any, bound: _Bound) -> Iterator[_Bound]:
        if isinstance(mine.target, Reading):
            for parts in mine.target.read(theirs):
                yield from self._bind_all(mine.args, parts, bound)
            return
        if not isinstance(theirs, Node):
            return
        one, other = self.calls[mine], _call_of(theirs)
        if one is not None and other is not None and one.kind not in _AS_SPELLED:
            if one.kind != other.kind or set(one.arguments) != set(other.arguments):
                return
            if one.kind in _COMMUTATIVE and one.arguments.get("alpha", 1) == 1:
                for pair in either_way(other):
                    yield from self._bind_all((one["input"], one["other"]), pair, bound)
                return
            yield from self._bind_all(list(one.arguments.values()), [other[name] for name in one.arguments], bound)
        elif mine.op == theirs.op and mine.target == theirs.target and set(mine.kwargs) == set(theirs.kwargs):
            args = [theirs.args, *(theirs.kwargs[name] for name in mine.kwargs)]
            yield from self._bind_all([mine.args, *mine.kwargs.values()], args, bound)

    def _bind_all(self, mine: Sequence[Any], theirs: Sequence[Any], bound: _Bound) -> Iterator[_Bound]:
        if len(mine) != len(theirs):
            return
        if not mine:
            yield bound
            return
        for so_far in self._bind(mine[0], theirs[0], bound):
            yield from self._bind_all(mine[1:], theirs[1:], so_far)


def _path(graph: Graph, calls: Mapping[Node, Call | None], end: Node, anchor: str | None) -> tuple[Node, ...]:
    """Return the nodes from the last one with the anchor's name to the end, each an argument of the next."""

    def name(node: Node) -> str:
        call = calls[node]
        return call.kind if call is not None else getattr(node.target, "__name__", str(node.target))

    path = [next(node for node in reversed(graph.nodes) if name(node) == anchor) if anchor is not None else end]
    while path[-1] is not end:
        path.append(next(iter(path[-1].users)))
    return tuple(path)


def _call_of(node: Node) -> Call | None:
    """Return `call_of`, with a square as torch computes it: as the power of the integer 2."""
    call = call_of(node)
    if call is not None and call.kind == "square":
        return Call("pow", {"input": call.input, "exponent": 2})
    return call


def _is_same(one: object, other: object) -> bool:
    """Return whether two arguments that are no tensors are equal; 2 and 2.0 differ, because they give other dtypes."""
    return not isinstance(one, Node) and type(one) is type(other) and bool(one == other)


def _why_no_pattern(node: Node) -> str | None:
    if node.op == "placeholder" and not node.users:
        return f"it does not read {node.target}"
    if node.op == "get_attr":
        return "it reads a tensor that is no parameter, of which only the name would be compared: make it a parameter"
    if writes(node):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
        return f"its call of {name} writes to an argument, which a kernel does not: take the one that makes a tensor"
    return None


def _why_not_bound(kinds: Mapping[str, Any]) -> str | None:
    """Return why no argument of a graph ever has a parameter's type, or None."""
    for name, kind in kinds.items():
        if kind is Any:  # no class in Python 3.10
            continue
        if not isinstance(kind, type) or get_origin(kind) is not None:
            return f"its parameter {name} is {kind}, and a pattern knows a Tensor or a number alone"
    return None

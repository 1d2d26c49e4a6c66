"""A pattern that is a function itself: where a captured graph makes the same calls as the function does.

The function is traced without values, by torch.fx. A place of a graph is like it when it makes the same calls of the
same numbers on whatever tensors: then it computes the same, whatever their shapes and dtypes. Spellings that `call_of`
knows for the same are, `x.square()` and `x ** 2` are, and so are the orders of a sum and of a product; reshapes,
copies, `and`, `or` and `not` must be spelled alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_origin

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .matching import Call, call_of, either_way, value_of, writes
from .spec import Match

_COMMUTATIVE = ("add", "mul")
# What `call_of` takes for one though sizes differ, or spellings do of which only those of booleans are the same.
_AS_SPELLED = ("reshape", "expand", "contiguous", "not", "and", "or")


@dataclass(frozen=True, repr=False)
class Likeness:
    """What is like a function.

    Attributes:
        graph: The calls of the function.
        names: Its parameters, in order.
        tensors: Those that are tensors.
        numbers: The types of the others.
    """

    graph: Graph
    names: tuple[str, ...]
    tensors: frozenset[str]
    numbers: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Tensor]) -> Likeness:
        """Traces a function.

        Args:
            function: Plain torch, with parameters annotated as Tensor or as numbers.

        Raises:
            ValueError: It cannot be traced without values, returns what it was given, or not one tensor; a parameter is
                unread, or may be something other than a tensor or a number; it writes, or reads a tensor of its own.
        """
        signature = inspect.signature(function, eval_str=True)
        try:
            graph = torch.fx.symbolic_trace(function).graph
        except Exception as error:
            raise ValueError(f"it cannot be traced without values ({error})") from error
        kinds = {name: item.annotation for name, item in signature.parameters.items()}
        made = cls(graph, tuple(kinds), frozenset(name for name, kind in kinds.items() if kind is Tensor), kinds)
        if not isinstance(made.end, Node) or made.end.op not in ("call_function", "call_method"):
            raise ValueError("it does not return the result of a call")
        reason = next(filter(None, map(_why_no_pattern, graph.nodes)), None) or _why_not_bound(kinds)
        if reason is not None:
            raise ValueError(reason)
        return made

    @property
    def end(self) -> Any:
        """The call of which the function returns the result."""
        return next(node for node in self.graph.nodes if node.op == "output").args[0]

    def is_anchor(self, node: Node) -> bool:
        """Whether a node makes the function's last call."""
        mine, theirs = _call_of(self.end), _call_of(node)
        if mine is not None and theirs is not None:
            return mine.kind == theirs.kind
        return node.op == self.end.op and node.target == self.end.target

    def match(self, node: Node) -> Match | None:
        """Finds what is like the function and ends with `node`; its inputs are the function's arguments."""
        bound = self._bind(self.end, node, {})
        if bound is None or set(bound) != set(self.names):
            return None
        return Match(node, tuple(bound[name] for name in self.names))

    def _bind(self, mine: object, theirs: object, bound: Mapping[str, Any]) -> dict[str, Any] | None:
        """`bound` and what else the function's parameters have to be for the two to be alike; None where nothing is."""
        if isinstance(mine, Node):
            if mine.op == "placeholder":
                return self._bind_parameter(str(mine.target), theirs, bound)
            return self._bind_call(mine, theirs, bound) if isinstance(theirs, Node) else None
        if isinstance(mine, (tuple, list)):
            if not isinstance(theirs, (tuple, list)) or len(mine) != len(theirs):
                return None
            return self._bind_all(mine, theirs, bound)
        return dict(bound) if _is_same(mine, theirs) else None

    def _bind_parameter(self, name: str, theirs: object, bound: Mapping[str, Any]) -> dict[str, Any] | None:
        if name in bound:
            return dict(bound) if bound[name] is theirs or _is_same(bound[name], theirs) else None
        is_right = value_of(theirs) is not None if name in self.tensors else type(theirs) is self.numbers[name]
        return {**bound, name: theirs} if is_right else None

    def _bind_call(self, mine: Node, theirs: Node, bound: Mapping[str, Any]) -> dict[str, Any] | None:
        one, other = _call_of(mine), _call_of(theirs)
        if one is not None and other is not None and one.kind not in _AS_SPELLED:
            if one.kind != other.kind or set(one.arguments) != set(other.arguments):
                return None
            if one.kind in _COMMUTATIVE and one.arguments.get("alpha", 1) == 1:
                orders = (self._bind_all((one["input"], one["other"]), pair, bound) for pair in either_way(other))
                return next((found for found in orders if found is not None), None)
            return self._bind_all(list(one.arguments.values()), [other[name] for name in one.arguments], bound)
        if mine.op != theirs.op or mine.target != theirs.target or set(mine.kwargs) != set(theirs.kwargs):
            return None
        after = self._bind(mine.args, theirs.args, bound)
        if after is None:
            return None
        return self._bind_all(list(mine.kwargs.values()), [theirs.kwargs[name] for name in mine.kwargs], after)

    def _bind_all(self, mine: Any, theirs: Any, bound: Mapping[str, Any]) -> dict[str, Any] | None:
        so_far: dict[str, Any] | None = dict(bound)
        for one, other in zip(mine, theirs, strict=True):
            so_far = self._bind(one, other, so_far) if so_far is not None else None
        return so_far


def _call_of(node: Node) -> Call | None:
    """`call_of`, with a square as torch computes it: as the power of the integer 2."""
    call = call_of(node)
    if call is not None and call.kind == "square":
        return Call("pow", {"input": call.input, "exponent": 2})
    return call


def _is_same(one: object, other: object) -> bool:
    """Whether two arguments that are no tensors are the same; 2 and 2.0 make other dtypes."""
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
    """Why no argument of a graph is ever of a parameter's type, or None."""
    for name, kind in kinds.items():
        if not isinstance(kind, type) or get_origin(kind) is not None:
            return f"its parameter {name} is {kind}, and a pattern knows a Tensor or a number alone"
    return None

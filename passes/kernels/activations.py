"""Recognition of GELU: as torch's call, or written out with erf or tanh.

This walks the graph instead of comparing it with functions: factors come in any order, and the argument is any
polynomial of the right coefficients, so there are too many spellings to list.

0.5 * x * (1 + erf(x / sqrt(2))) 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from .matching import call_of, either_way, is_call, number_of, only_user

# Power of x -> its coefficient in the argument of erf or tanh.
_ARGUMENTS: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "erf": MappingProxyType({1: math.sqrt(0.5)}),
        "tanh": MappingProxyType({1: math.sqrt(2 / math.pi), 3: math.sqrt(2 / math.pi) * 0.044715}),
    }
)
_APPROXIMATE = MappingProxyType({"erf": "none", "tanh": "tanh"})
# Constants are written with eight digits or more; a tenth of float32's precision is lost on nobody.
_CLOSE = 1e-8
_OF_POLYNOMIALS = ("pow", "square", "add", "mul", "div")
# How many calls may lie between x and an argument of erf or tanh; each may read two, so more would take too long.
_MOST_STEPS = 8
_Polynomial = dict[int, float]


@dataclass(frozen=True)
class Gelu:
    """`gelu(x)`.

    Attributes:
        end: Its value.
        x: Its argument.
        approximate: "none" or "tanh".
        why_not: Why it is not exactly a GELU, or None.
    """

    end: Node
    x: Node
    approximate: str
    why_not: str | None = None


def is_gelu(node: Node) -> bool:
    """Return True if a node calls `gelu`, or an operator with which one is written out."""
    return is_call(node, "gelu", "erf", "tanh")


def gelu_of(node: Node) -> Gelu | None:
    """Return the GELU whose anchor is `node`, a call of `gelu`, `erf` or `tanh`."""
    call = call_of(node)
    if call is None:
        return None
    if call.kind == "gelu":
        x, approximate = call.input, call["approximate"]
        return Gelu(node, x, approximate) if isinstance(x, Node) and approximate in ("none", "tanh") else None
    if call.kind not in _ARGUMENTS:
        return None
    for user in node.users:
        plus = call_of(user)
        if plus is not None and plus.kind == "add" and any(number_of(other) == 1 for _, other in either_way(plus)):
            return _written_out(call.kind, call.input, user)
    return None


def _written_out(kind: str, argument: Any, one_plus: Node) -> Gelu | None:
    found = _multiplied(one_plus, argument)
    if found is None:
        return None
    end, x, factor = found
    polynomial, expected = _polynomial(argument, x), _ARGUMENTS[kind]
    assert polynomial is not None
    powers = {power for power, coefficient in polynomial.items() if coefficient}
    why_not = None
    if powers != set(expected) or not all(_is_close(polynomial[power], expected[power]) for power in powers):
        why_not = f"its {kind} is of {_text(polynomial)}, that of a GELU of {_text(expected)}"
    elif not _is_close(factor, 0.5):
        why_not = f"it is multiplied by {factor}, a GELU by 0.5"
    return Gelu(end, x, _APPROXIMATE[kind], why_not)


def _multiplied(node: Node, argument: Any) -> tuple[Node, Node, float] | None:
    """Return `number * x * node`, x and the number, for a polynomial `argument`, times 0.5 if it follows."""
    end, x, factor = node, None, 1.0
    while x is None or not _is_close(factor, 0.5):
        step = _next_factor(end)
        if step is None:
            break
        user, other = step
        number, tensor = (1.0, other) if _polynomial(argument, other) is not None else _scaled(other)
        if tensor is not None:
            if x is not None or _polynomial(argument, tensor) is None:
                break
            x = tensor
        end, factor = user, factor * number
    return (end, x, factor) if x is not None else None


def _next_factor(node: Node) -> tuple[Node, Any] | None:
    """Return the product that is the only reader of a node, and its other factor."""
    user = only_user(node)
    call = call_of(user)
    if call is None:
        return None
    if call.kind == "div" and call.input is node and call["rounding_mode"] is None:
        divisor = number_of(call["other"])
        return (user, 1 / divisor) if divisor else None
    if call.kind != "mul" or call.input is call["other"]:
        return None
    return user, call["other"] if call.input is node else call.input


def _scaled(node: Any) -> tuple[float, Node | None]:
    """Return a factor as a number times a node."""
    number = number_of(node)
    if number is not None:
        return number, None
    call = call_of(node)
    if call is not None and call.kind == "mul":
        for one, other in either_way(call):
            number = number_of(one)
            if number is not None and isinstance(other, Node):
                return number, other
    if call is not None and call.kind == "div" and call["rounding_mode"] is None:
        divisor = number_of(call["other"])
        if divisor and isinstance(call.input, Node):
            return 1 / divisor, call.input
    return 1.0, node


def _polynomial(node: Any, x: Any) -> _Polynomial | None:
    """Return the polynomial in x that a node computes; None if it is none, or has no x."""
    found = _terms(node, x)
    return found if found is not None and set(found) - {0} else None


def _terms(node: Any, x: Any, steps: int = _MOST_STEPS) -> _Polynomial | None:
    if node is x and isinstance(x, Node):
        return {1: 1.0}
    number = number_of(node)
    if number is not None:
        return {0: number}
    call = call_of(node) if steps else None
    one = _terms(call.input, x, steps - 1) if call is not None and call.kind in _OF_POLYNOMIALS else None
    if call is None or one is None:
        return None
    if call.kind in ("pow", "square"):
        exponent = number_of(call.arguments.get("exponent", 2))
        return reduce(_times, [one] * int(exponent)) if exponent in (1, 2, 3) else None
    other = _terms(call["other"], x, steps - 1)
    if other is None or call.arguments.get("alpha", 1) != 1 or call.arguments.get("rounding_mode") is not None:
        return None
    if call.kind == "add":
        return {power: one.get(power, 0.0) + other.get(power, 0.0) for power in {*one, *other}}
    if call.kind == "mul":
        return _times(one, other)
    return {power: value / other[0] for power, value in one.items()} if set(other) == {0} and other[0] else None


def _times(one: _Polynomial, other: _Polynomial) -> _Polynomial:
    result: _Polynomial = {}
    for p, a in one.items():
        for q, b in other.items():
            result[p + q] = result.get(p + q, 0.0) + a * b
    return result


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_CLOSE)


def _text(polynomial: Mapping[int, float]) -> str:
    return " + ".join(f"{value:.7g} x^{power}" for power, value in sorted(polynomial.items()) if value)

"""Sizes of fake tensors: bytes, as numbers or as sympy expressions, and the values of symbols."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from dsgraph.passes.compat import known_sizes, symbolic_expression
from dsgraph.passes.errors import PassError

Size: TypeAlias = "int | sympy.Expr"

# The number assumed for a size that depends on data, such as that of `nonzero`. Inductor's default.
UNKNOWN_SIZE = 8192


def tensor_bytes(value: object) -> Size:
    """Return the bytes of a (fake) tensor's elements; of all tensors in a tuple or list; 0 for anything else."""
    if isinstance(value, (tuple, list)):
        return sum((tensor_bytes(item) for item in value), 0)
    if not isinstance(value, Tensor):
        return 0
    return math.prod(map(expression_of, value.shape)) * value.element_size()


def size_hints(value: object) -> Mapping[sympy.Symbol, int]:
    """Return the values of the symbols in the sizes of a fake tensor, or of tensors in a tuple or list."""
    if isinstance(value, (tuple, list)):
        return {symbol: number for item in value for symbol, number in size_hints(item).items()}
    sizes: Sequence[object] = value.shape if isinstance(value, Tensor) else (value,)
    return {
        symbol: number
        for size in sizes
        if isinstance(size, torch.SymInt)
        for symbol, number in known_sizes(size).items()
    }


def hint(
    size: Size | torch.SymInt,
    hints: Mapping[sympy.Symbol, int] = MappingProxyType({}),
    *,
    unknown: int | None = None,
) -> int:
    """Return the value of a size in the run for which the graph was traced.

    Args:
        size: A number, an expression, or a symbolic size of a fake tensor, which knows its own symbols.
        hints: Symbol -> number, from `size_hints`.
        unknown: The value of a symbol without a number.

    Raises:
        PassError: A symbol has no number, and `unknown` is None.
    """
    if isinstance(size, torch.SymInt):
        hints = {**known_sizes(size), **hints}
        size = expression_of(size)
    if not isinstance(size, sympy.Expr):
        return int(size)
    missing = sorted(map(str, size.free_symbols - hints.keys()))
    if missing and unknown is None:
        raise PassError(
            f"the size {size} depends on {', '.join(missing)}, of which no number is known: "
            "pass size_hints(...) of a value that has it in its shape, or `unknown`"
        )
    return int(size.xreplace({symbol: sympy.Integer(hints.get(symbol, unknown)) for symbol in size.free_symbols}))


def number_of(node: Node, size: Size) -> int:
    """Return the value of a size that belongs to a node; data-dependent sizes count as `UNKNOWN_SIZE`."""
    if not isinstance(size, sympy.Expr):
        return int(size)
    hints = size_hints([value.meta.get("val") for value in (node, *node.all_input_nodes)])
    return hint(size, hints, unknown=UNKNOWN_SIZE)


def expression_of(size: Any) -> Any:
    """Return a symbolic size as a sympy expression; anything else unchanged."""
    return symbolic_expression(size) if isinstance(size, torch.SymInt) else size

"""Dynamic sizes as nodes of a graph: they are computed from the sizes that the graph knows."""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import reduce
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.compat import symbolic_expression

from .graph import emit, placeholders


class SizeNodes:
    """Nodes of a graph for symbolic sizes.

    A symbol is known if it is an input, or a size of an input. Sums, products and powers are computed from those.
    """

    def __init__(self, gm: GraphModule, *, saved: Collection[str] = ()) -> None:
        """Read the inputs of a graph.

        Args:
            gm: The graph.
            saved: Names of inputs that are saved tensors, which may be removed.
        """
        self._first = next(node for node in gm.graph.nodes if node.op != "placeholder")
        self._known: dict[sympy.Symbol, tuple[Node, int | None]] = {}
        self._made: dict[sympy.Expr, Node] = {}
        for node in placeholders(gm):
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._note(value, node, None)
            elif isinstance(value, torch.Tensor) and node.name not in saved:
                for number, size in enumerate(value.shape):
                    self._note(size, node, number)

    def knows(self, size: Any) -> bool:
        """Return whether a size can be computed; numbers can."""
        if not isinstance(size, torch.SymInt):
            return True
        expression = symbolic_expression(size)
        return isinstance(expression, int) or (_is_simple(expression) and expression.free_symbols <= self._known.keys())

    def node(self, size: Any) -> Any:
        """Return the size as an argument of a node: a number, or a node at the start of the graph."""
        if not isinstance(size, torch.SymInt):
            return size
        expression = symbolic_expression(size)
        return expression if isinstance(expression, int) else self._compute(expression)

    def _note(self, size: Any, node: Node, number: int | None) -> None:
        expression = symbolic_expression(size) if isinstance(size, torch.SymInt) else size
        if isinstance(expression, sympy.Symbol):
            self._known.setdefault(expression, (node, number))

    def _compute(self, expression: sympy.Expr) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression not in self._made:
            self._made[expression] = self._emit(expression)
        return self._made[expression]

    def _emit(self, expression: sympy.Expr) -> Any:
        if isinstance(expression, sympy.Symbol):
            node, number = self._known[expression]
            return node if number is None else emit(self._first, torch.ops.aten.sym_size.int, node, number)
        if isinstance(expression, sympy.Pow):
            base, exponent = expression.args
            parts = [self._compute(base)] * int(exponent)
        else:
            parts = [self._compute(part) for part in expression.args]
        step = operator.add if isinstance(expression, sympy.Add) else operator.mul
        return reduce(lambda one, other: emit(self._first, step, one, other), parts)


def _is_simple(expression: sympy.Expr) -> bool:
    """Return whether an expression consists of numbers, symbols, sums, products and powers with integer exponents."""
    if isinstance(expression, (sympy.Symbol, sympy.Integer)):
        return True
    if isinstance(expression, sympy.Pow):
        base, exponent = expression.args
        return bool(exponent.is_Integer and exponent > 0) and _is_simple(base)
    return isinstance(expression, (sympy.Add, sympy.Mul)) and all(map(_is_simple, expression.args))

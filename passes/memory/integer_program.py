"""Mixed-integer linear programs, solved by HiGHS (`scipy.optimize.milp`).

scipy is imported by the first solve: the import takes 0.3 s, and most graphs have no memory limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsgraph.passes.analysis.quiet import without_library_output

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Bounded:
    """Rows of constraints: `low <= rows @ x <= high`. `rows` is dense or sparse, `[constraints, variables]`."""

    rows: Any
    low: Vector | float = -np.inf
    high: Vector | float = np.inf


def sparse_rows(entries: Iterable[tuple[int, int, float]], shape: tuple[int, int]) -> Any:
    """Return a sparse matrix of entries (row, column, factor)."""
    from scipy.sparse import coo_array

    lines, columns, factors = zip(*entries, strict=True)
    return coo_array((factors, (lines, columns)), shape=shape).tocsr()


def minimize(
    cost: Vector,
    *,
    integral: NDArray[np.int64],
    low: Vector,
    high: Vector,
    constraints: Sequence[Bounded],
    gap: float,
    nodes: int,
) -> Vector | None:
    """Return the variables of least cost.

    Args:
        cost: `[variables]`.
        integral: `[variables]`; 1 for an integer variable, else 0.
        low: `[variables]`, lower bounds.
        high: `[variables]`, upper bounds.
        constraints: Bounds on linear combinations of the variables.
        gap: The relative distance from the optimum at which the search ends.
        nodes: The most nodes of the search: it is the same on every rank, which a limit of time is not.

    Returns:
        `[variables]`; None if nothing satisfies the constraints.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    with without_library_output():
        found = milp(
            cost,
            integrality=integral,
            bounds=Bounds(low, high),
            constraints=[LinearConstraint(each.rows, lb=each.low, ub=each.high) for each in constraints],
            options={"mip_rel_gap": gap, "node_limit": nodes},
        )
    values: Vector | None = found.x
    return values

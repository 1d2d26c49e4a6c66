"""The largest eigenvalue of the loss's Hessian with respect to the weights of one block, by power iteration.

Products with the Hessian are central differences of gradients. So they need no second derivative of a compiled graph,
and cost as much as a backward at any ZeRO stage:

    H v ~ (g(w + e v) - g(w - e v)) / 2e        e = cube root of the dtype's precision, times |w|, for v of length 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Gradients = Callable[[], Mapping[str, Tensor]]
"""A function that computes gradients of the same loss, by parameter; those of DTensors are DTensors."""


def largest_eigenvalue(
    parameters: Mapping[str, Tensor],
    gradients: Gradients,
    *,
    max_iter: int,
    tol: float,
    stability: float,
    precision: float = torch.finfo(torch.float32).eps,
) -> float:
    """Return the eigenvalue of largest magnitude; NaN if the iteration gives no finite number.

    It starts in the direction of the gradient, which is equal on all ranks. All ranks call it together. The parameters
    are changed during the call, and restored at its end.

    Args:
        parameters: Of one block.
        gradients: See `Gradients`; for all of these.
        max_iter: Iterations, at most.
        tol: Relative change of the eigenvalue at which the iteration ends.
        stability: Added to the norm by which a vector is divided.
        precision: Of the dtype in which gradients are computed.
    """
    names = list(parameters)
    before = [_local(parameters[name]).clone() for name in names]
    step = precision ** (1 / 3) * max(_norm([parameters[name] for name in names]), 1e-3)

    def at(direction: Sequence[Tensor], scale: float) -> list[Tensor]:
        _move(parameters, names, before, direction, scale)
        found = gradients()
        return [found[name].detach().clone() for name in names]

    found = 0.0
    try:
        vector = _scaled(at([parameters[name].detach() for name in names], 0.0), stability)
        for _ in range(max_iter):
            ahead, behind = at(vector, step), at(vector, -step)
            product = [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]
            previous, found = found, _dot(product, vector)
            if not math.isfinite(found) or found == 0 or abs((found - previous) / found) < tol:
                break
            vector = _scaled(product, stability)
    finally:
        _move(parameters, names, before, before, 0.0)
    return found if math.isfinite(found) else math.nan


def shares_of_largest(eigenvalues: Sequence[float]) -> list[float]:
    """Return magnitudes divided by the largest one; 1 for those that are 0 or not finite, as in DeepSpeed."""
    magnitudes = [abs(value) for value in eigenvalues]
    largest = max((value for value in magnitudes if math.isfinite(value)), default=0.0)
    return [value / largest if math.isfinite(value) and value else 1.0 for value in magnitudes]


def _move(
    parameters: Mapping[str, Tensor],
    names: Sequence[str],
    before: Sequence[Tensor],
    direction: Sequence[Tensor],
    scale: float,
) -> None:
    with torch.no_grad():
        for name, old, towards in zip(names, before, direction, strict=True):
            param = parameters[name]
            _local(param).copy_(old).add_(_local(towards), alpha=scale)
            torch.autograd.graph.increment_version(param)  # so that gathered copies are gathered again


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    total = 0.0
    for a, b in zip(one, other, strict=True):
        product = (a.detach() * b.detach()).sum()
        total += float(product.full_tensor() if isinstance(product, DTensor) else product)
    return total


def _norm(vector: Sequence[Tensor]) -> float:
    return math.sqrt(max(_dot(vector, vector), 0.0))


def _scaled(vector: Sequence[Tensor], stability: float) -> list[Tensor]:
    length = _norm(vector) + stability
    return [part / length for part in vector] if length else list(vector)

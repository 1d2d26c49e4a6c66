"""Quantized weights that are rounded so that a layer's outputs, rather than its weight, change little.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (arXiv 2210.17323).
With inputs x of a layer of weight W `(n, k)`, the outputs of a changed weight W' differ by

    sum over x of |(W - W') x|^2 = tr((W - W') H (W - W')^T)        H = sum x x^T, `(k, k)`

Columns are rounded one after the other. The later columns compensate for the error of column j:

    U = upper Cholesky factor of H^-1        e = (w_j - rounded w_j) / U[j, j]        w_i -= e U[j, i]    for i > j

1 % of its mean diagonal is added to H, ten times as much if it still has no factor. Scales are those of `quantize_rows`
for the original weight, or of `quantize_groups` for each group with the compensation of the columns before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.batches import call_with
from dsgraph.inductor_ext.quant.weights import (
    dequantize_groups,
    dequantize_rows,
    grid_of_groups,
    pack_groups,
    quantize_groups,
    quantize_rows,
)

_DAMPING = 0.01
_BLOCK = 128
"""Number of columns after which the other columns are updated with their errors, in one product."""


@dataclass(frozen=True)
class Rounded:
    """A rounded weight, and the error of the layer's outputs.

    Attributes:
        packed: As in `QuantizedLinear`.
        scale: As in `QuantizedLinear`.
        least: As in `QuantizedLinear`; None for 8 bits.
        error: Norm of the outputs' change over the norm of the outputs.
        error_to_nearest: The same for the weight rounded to nearest.
    """

    packed: Tensor
    scale: Tensor
    least: Tensor | None
    error: float
    error_to_nearest: float


@torch.no_grad()
def round_weight(weight: Tensor, products: Tensor, *, bits: int, group: int) -> Rounded:
    """Round a weight for given inputs; to nearest if that changes the outputs less.

    Args:
        weight: Floating point, (n, k).
        products: H above, float32 (k, k).
        bits: 8 or 4.
        group: Number of neighbours in a row that share a scale, for 4 bits.
    """
    weight = weight.detach().float()
    packed, scale, least = nearest = _to_nearest(weight, bits=bits, group=group)
    size = _size(weight, products)
    error = to_nearest = _size(weight - _dequantized(nearest), products) / size
    calibrated = _calibrated(weight, products, bits=bits, group=group)
    if calibrated is not None:
        found = _size(weight - _dequantized(calibrated), products) / size
        if found < error:
            error, (packed, scale, least) = found, calibrated
    return Rounded(packed, scale, least, error, to_nearest)


def _size(weight: Tensor, products: Tensor) -> float:
    """Return the norm of the outputs of a weight."""
    return float(((weight @ products) * weight).sum().clamp_min(1e-30).sqrt())


_Packed = tuple[Tensor, Tensor, Tensor | None]


def _to_nearest(weight: Tensor, *, bits: int, group: int) -> _Packed:
    return (*quantize_rows(weight), None) if bits == 8 else quantize_groups(weight, group=group)


def _dequantized(rounded: _Packed) -> Tensor:
    packed, scale, least = rounded
    return dequantize_rows(packed, scale) if least is None else dequantize_groups(packed, scale, least)


def _calibrated(weight: Tensor, products: Tensor, *, bits: int, group: int) -> _Packed | None:
    factor = _factor(products)
    if factor is None:
        return None
    if bits == 8:
        _, scale = quantize_rows(weight)
        numbers = torch.empty_like(weight)
        for start, left in _blocks(weight, factor, columns=_BLOCK):
            for at in left:
                numbers[:, start + at] = (left[at] / scale).round().clamp(-127, 127)
                left[at] = numbers[:, start + at] * scale
        return numbers.to(torch.int8), scale, None
    scales, leasts, numbers = [], [], torch.empty_like(weight)
    for start, left in _blocks(weight, factor, columns=max(_BLOCK // group, 1) * group):
        for at in left:
            if at % group == 0:
                scale, least = grid_of_groups(left.columns(at, at + group).unsqueeze(1))
                scales.append(scale)
                leasts.append(least)
            scale, least = scales[-1][:, 0], leasts[-1][:, 0]
            numbers[:, start + at] = ((left[at] - least) / scale).round().clamp(0, 15)
            left[at] = numbers[:, start + at] * scale + least
    packed = pack_groups(numbers.unflatten(1, (-1, group)).to(torch.uint8))
    return packed, torch.cat(scales, 1), torch.cat(leasts, 1)


class _Columns:
    """A block of columns that are rounded one after the other: `left[at]` is read, then set to the rounded column.

    Attributes:
        errors: (n, columns): e above.
    """

    def __init__(self, weight: Tensor, factor: Tensor) -> None:
        self._weight, self._factor = weight, factor
        self.errors = torch.zeros_like(weight)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._weight.shape[1]))

    def __getitem__(self, at: int) -> Tensor:
        return self._weight[:, at]

    def columns(self, start: int, end: int) -> Tensor:
        return self._weight[:, start:end]

    def __setitem__(self, at: int, rounded: Tensor) -> None:
        error = (self._weight[:, at] - rounded) / self._factor[at, at]
        self._weight[:, at:] -= torch.outer(error, self._factor[at, at:])
        self.errors[:, at] = error


def _blocks(weight: Tensor, factor: Tensor, *, columns: int) -> Iterator[tuple[int, _Columns]]:
    weight = weight.clone()
    for start in range(0, weight.shape[1], columns):
        end = min(start + columns, weight.shape[1])
        left = _Columns(weight[:, start:end], factor[start:end, start:end])
        yield start, left
        weight[:, end:] -= left.errors @ factor[start:end, end:]


def _factor(products: Tensor) -> Tensor | None:
    """Return U above; None if no damping gives one, as for inputs that are not finite."""
    diagonal = products.diagonal()
    # Inputs that are always 0 leave their columns without a say: 1 keeps them apart from the others.
    silent = diagonal == 0
    for tenfold in range(4):
        damped = products.clone()
        damped.diagonal().add_(silent + _DAMPING * 10**tenfold * diagonal.mean())
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                return upper
    return None


class _ReachedError(Exception):
    """Ends a forward whose rest is not needed."""


def inputs_in_order(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Sequence[Any]
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Run the model repeatedly, up to one layer after the other.

    The caller may change the yielded layers between two steps: later steps see the changed model. One matrix of
    products is in memory at a time. The model runs once for each different input of layers.

    Args:
        model: The model, in `eval()`.
        layers: Its layers by name.
        batches: See `call_with`.

    Yields:
        Names of layers that have the same inputs, and the matrix H of these inputs. Layers that never run are left out.
    """
    for names, is_once in _together(model, layers, batches):
        first = layers[names[0]]
        products: list[Tensor] = []

        def add(_: nn.Module, given: tuple[Any, ...], found: list[Tensor] = products, ends: bool = is_once) -> None:
            rows = given[0].detach().flatten(0, -2).float()
            if not found:
                found.append(rows.t() @ rows)
            else:
                found[0].addmm_(rows.t(), rows)
            if ends:
                raise _ReachedError

        with _hooks({first: add}):
            _run(model, batches)
        yield names, products[0]


def _together(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Sequence[Any]
) -> list[tuple[tuple[str, ...], bool]]:
    """Return the layers that have the same input, in the order in which they run, and if they run once a forward."""
    groups: dict[str, list[str]] = {}
    runs: dict[str, int] = {}
    latest: list[Any] = [None, ""]

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
            runs[name] = runs.get(name, 0) + 1
            known = {other for group in groups.values() for other in group}
            if name not in known:
                if given[0] is latest[0] and latest[1] in groups:
                    groups[latest[1]].append(name)
                else:
                    groups[name] = [name]
            if given[0] is not latest[0]:
                latest[:] = [given[0], name]

        return hook

    with _hooks({layer: note(name) for name, layer in layers.items()}):
        _run(model, batches)
    return [(tuple(names), runs[first] <= len(batches)) for first, names in groups.items()]


@contextmanager
def _hooks(hooks: Mapping[nn.Module, Callable[..., None]]) -> Iterator[None]:
    handles = [layer.register_forward_pre_hook(hook) for layer, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _run(model: nn.Module, batches: Sequence[Any]) -> None:
    for batch in batches:
        try:
            call_with(model, batch)
        except _ReachedError:
            continue

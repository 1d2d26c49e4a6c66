"""Runs a compiled graph on copies of its inputs, so that the program does not notice, and compares what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.compat.tensors import default_tolerances

Values = Mapping[str, Any]
"""Results of a run, by name: "output 0", "gradient of block.weight", "norm.running_mean as the graph leaves it"."""

_GRADIENT = "gradient of "


@dataclass(frozen=True)
class Tolerance:
    """How far a tensor may be off: `(rtol + atol) * m`, where m is the largest magnitude in the tensor it should equal.

    Magnitudes are the tensor's, not each element's: a sum of large numbers that nearly cancel is off by the rounding of
    the large ones, and a gradient of 1e-6 that is off by half is wrong. None: as `torch.testing` for the dtype.
    """

    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return (rtol, atol) for a dtype."""
        rtol, atol = default_tolerances(dtype)
        return (rtol if self.rtol is None else self.rtol), (atol if self.atol is None else self.atol)


@dataclass(frozen=True)
class Difference:
    """By how much two tensors differ.

    Attributes:
        largest: The largest difference between two elements; None where one of them is not finite.
        allowed: The largest that would do.
        note: What else is wrong: another shape, no tensor at all.
    """

    largest: float | None
    allowed: float
    note: str = ""

    @property
    def is_off(self) -> bool:
        """True if it is more than allowed."""
        return bool(self.note) or self.largest is None or self.largest > self.allowed


class RecordedCall:
    """One call of a graph, to be repeated: its inputs, the state of the random number generators, the cotangents.

    Each run gets copies of the inputs (those that share memory share it again), the same random numbers and the same
    cotangents, so that runs differ only in the code that is run.
    """

    def __init__(self, inputs: Sequence[Any], names: Sequence[str]) -> None:
        self._inputs = inputs
        self._names = names

    def run(self, compiled: Callable[..., Any]) -> Values:
        """Return outputs, gradients of all inputs that require them, and inputs that the graph has written to."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            return dict(self._run(compiled))

    def _run(self, compiled: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
        leaves, arguments = self._copies()
        outputs = list(compiled(*arguments))
        for number, value in enumerate(outputs):
            yield f"output {number}", _snapshot(value)
        reached = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
        if leaves and reached:
            cotangents = [_cotangent(number, out) for number, out in enumerate(reached)]
            gradients = torch.autograd.grad(reached, list(leaves.values()), cotangents, allow_unused=True)
            for name, gradient in zip(leaves, gradients, strict=True):
                yield _GRADIENT + name, _snapshot(gradient)
        for name, argument, original in zip(self._names, arguments, self._inputs, strict=True):
            if isinstance(argument, Tensor):
                after, before = _local(argument), _local(original)
                if not torch.equal(after, before):
                    yield f"{name} as the graph leaves it", _snapshot(after)

    def _copies(self) -> tuple[dict[str, Tensor], list[Any]]:
        """Return copies of the inputs: those that get a gradient by name, and what to call the graph with."""
        leaves: dict[str, Tensor] = {}
        arguments: list[Any] = []
        memory: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        for name, value in zip(self._names, self._inputs, strict=True):
            if not isinstance(value, Tensor):
                arguments.append(value)
                continue
            copy = _copy(value.detach(), memory)
            if torch.is_grad_enabled() and value.requires_grad:
                leaves[name] = copy.requires_grad_()
            # In-place writes to a leaf are forbidden, to what was computed from one they are not.
            arguments.append(copy if value.is_leaf or name not in leaves else copy.clone())
        return leaves, arguments


def compare(expected: Values, found: Values, tolerance: Tolerance) -> dict[str, Difference]:
    """Return each value's difference from what is expected, by name."""
    gradients = [_largest(value) for name, value in expected.items() if name.startswith(_GRADIENT)]
    # A gradient that is 0 in exact arithmetic consists of the rounding errors of the terms of its sum.
    around = max(gradients, default=0.0)
    differences = {}
    for name in [*expected, *(name for name in found if name not in expected)]:
        floor = around if name.startswith(_GRADIENT) else 0.0
        differences[name] = difference(expected.get(name), found.get(name), tolerance, around=floor)
    return differences


def difference(expected: Any, found: Any, tolerance: Tolerance, *, around: float = 0.0) -> Difference:
    """Return how `found` differs from `expected`.

    Args:
        expected: Usually a tensor; None counts as zeros, as it does for a gradient.
        found: Likewise.
        tolerance: What is allowed.
        around: Magnitude of the numbers among which rounding happens; `rtol` times this is allowed besides.
    """
    if isinstance(expected, Tensor) and found is None:
        found = torch.zeros_like(expected)
    elif isinstance(found, Tensor) and expected is None:
        expected = torch.zeros_like(found)
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        same = type(expected) is type(found) and expected == found
        return Difference(0.0, 0.0, "" if same else f"is {found!r} and should be {expected!r}")
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return Difference(
            None,
            0.0,
            f"is {list(found.shape)} {found.dtype} and should be {list(expected.shape)} {expected.dtype}",
        )
    rtol, atol = tolerance.of(expected.dtype)
    allowed = (rtol + atol) * _largest(expected) + rtol * around
    return Difference(_largest_difference(expected, found), allowed)


def _largest_difference(expected: Tensor, found: Tensor) -> float | None:
    a, b = _numbers(expected), _numbers(found)
    if a.numel() == 0:
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())  # infinities are equal, their difference is not a number
    largest = torch.where(same, 0.0, (a - b).abs()).max().item()
    return largest if largest < float("inf") else None


def _largest(value: Any) -> float:
    """Return the largest finite magnitude in a tensor; 0 for anything else."""
    if not isinstance(value, Tensor) or value.numel() == 0:
        return 0.0
    numbers = _numbers(value).abs()
    return torch.where(numbers.isfinite(), numbers, 0.0).max().item()


def _numbers(value: Tensor) -> Tensor:
    numbers = torch.view_as_real(value) if value.is_complex() else value
    return numbers.to(torch.float64 if value.device.type != "mps" else torch.float32)


def _cotangent(number: int, output: Tensor) -> Tensor:
    """Return a gradient to begin the backward with: 1 for a loss, otherwise random numbers, other ones on each rank."""
    local = _local(output)
    if local.dim() == 0:
        values = torch.ones_like(local)
    else:
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(1_000 * rank + number)
        values = torch.randn(local.shape, generator=generator, dtype=torch.float64).to(local)
    return _like(values, output) if isinstance(output, DTensor) else values


def _snapshot(value: Any) -> Any:
    return _local(value).detach().clone() if isinstance(value, Tensor) else value


def _local(value: Tensor) -> Tensor:
    """Return this rank's part."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.to_local()


def _like(local: Tensor, whole: DTensor) -> DTensor:
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _copy(value: Tensor, memory: dict[tuple[torch.device, int], torch.UntypedStorage]) -> Tensor:
    """Return a copy with the same strides that shares memory with the copies of what `value` shares memory with."""
    if isinstance(value, DTensor):
        return _like(_copy(_local(value), memory), value)
    is_plain = type(value) is Tensor and value.layout is torch.strided and not value.is_conj() and not value.is_neg()
    storage = value.untyped_storage() if is_plain else None
    if storage is None or storage.nbytes() == 0:
        return value.clone()
    place = (value.device, storage.data_ptr())
    if place not in memory:
        memory[place] = storage.clone()
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(memory[place], value.storage_offset(), value.shape, value.stride())

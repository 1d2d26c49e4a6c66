"""Measures the time of collectives: those that passes choose among, in the form in which graphs run them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dsgraph.inductor_ext import c10d_functional
from dsgraph.passes.ir.collectives import TABLE, Collective, Role

from .device import synchronize
from .fit_line import Fit, fit_line

# Bytes of the whole tensor: of all rows that are gathered, scattered, exchanged or summed up.
SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 25)
_MORE_SIZES = {"nccl": (1 << 26, 1 << 27, 1 << 28)}  # NVLink reaches its rate with these alone
_MOST_REPEATS, _LEAST_REPEATS = 25, 3
_LEAST_SIZES = 4

Products = Sequence[Sequence[Tensor]]  # pairs of matrices

KINDS = tuple(kind for kind in TABLE.entries if kind.start is not None)


@dataclass(frozen=True)
class Measured:
    """The measurements of one kind of collective.

    Attributes:
        fit: The alpha-beta model of it.
        samples: Bytes that each rank sent, and the seconds (a median) that it took the slowest rank.
        busy: Seconds that products beside a collective take longer, a second of the collective: a median over the
            sizes, of all kinds together.
    """

    fit: Fit
    samples: tuple[tuple[int, float], ...]
    busy: float


def measure_collectives(
    group: dist.ProcessGroup, *, device_type: str, seconds: float, kinds: Sequence[Collective] = KINDS
) -> dict[str, Measured]:
    """Measure kinds of collectives over a group, from small tensors to large ones until the time is over.

    The kinds take turns, so that what disturbs the machine for a while disturbs them alike. All ranks of the default
    group call it, each with a group of its own; the first rank decides for all.

    Args:
        group: Over which ranks; two or more.
        device_type: Where the tensors lie.
        seconds: How long it may take; the four smallest sizes are measured in any case.
        kinds: What to measure.

    Returns:
        Name of the kind -> what was found out.
    """
    backend = dist.get_backend(group)
    kinds = [kind for kind in kinds if kind.only_on in ("", backend)]
    end = time.perf_counter() + seconds
    samples: dict[str, list[tuple[int, float]]] = {kind.kind: [] for kind in kinds}
    busy: list[float] = []
    turn = 0.0  # seconds that one call of every kind takes
    sizes = SIZES + _MORE_SIZES.get(backend, ())
    for number, size in enumerate(sizes):
        guess = turn * size / sizes[number - 1]
        if not _agreed(number < _LEAST_SIZES or time.perf_counter() + _LEAST_REPEATS * guess < end):
            break
        rows = max(1, size // (4 * group.size()))
        part = torch.ones(rows, device=device_type)
        whole = torch.ones(rows * group.size(), device=device_type)
        # The first call brings memory and connections.
        turn = sum(_seconds(kind, part, whole, group) for kind in kinds)
        fair = (end - time.perf_counter()) / (len(sizes) - number)
        repeats = _agreed(min(_MOST_REPEATS, max(_LEAST_REPEATS, int(fair / turn))))
        turns = [[_seconds(kind, part, whole, group) for kind in kinds] for _ in range(repeats)]
        medians = _slowest([statistics.median(times) for times in zip(*turns, strict=True)])
        busy.append(_busy(kinds, part, whole, group, sum(medians)))
        for kind, median in zip(kinds, medians, strict=True):
            samples[kind.kind].append((sent_bytes(kind, part, whole, group.size()), median))
    return {name: Measured(fit_line(found), tuple(found), statistics.median(busy)) for name, found in samples.items()}


def start(kind: Collective, part: Tensor, whole: Tensor, ranks: int, group: str) -> Tensor:
    """Start a collective of this rank's part `[rows]`, or of the whole `[ranks * rows]`."""
    assert kind.start is not None, f"{kind.kind} is not measured"
    return kind.start(part if kind.role is Role.GATHER else whole, ranks, group)


def sent_bytes(kind: Collective, part: Tensor, whole: Tensor, ranks: int) -> int:
    """Return the bytes that each rank sends for it."""
    counted = part if kind.role is Role.GATHER or kind.counts_result else whole
    return kind.sent_bytes(counted.nbytes, ranks) or 0


def _seconds(
    kind: Collective | None, part: Tensor, whole: Tensor, group: dist.ProcessGroup, layers: Products = ()
) -> float:
    """Return how long a collective takes from its start to its end, with matrix products beside it."""
    began = time.perf_counter()
    started = [start(kind, part, whole, group.size(), group.group_name)] if kind is not None else []
    for left, right in layers:
        torch.mm(left, right)
    for result in started:
        c10d_functional.wait_tensor(result)
    synchronize(part.device.type)
    return time.perf_counter() - began


def _busy(kinds: Sequence[Collective], part: Tensor, whole: Tensor, group: dist.ProcessGroup, alone: float) -> float:
    """Return how much longer products take beside collectives, as a share of `alone`, the seconds of those alone."""
    layers = [[torch.ones(*shape, device=part.device) for shape in ((256, 512), (512, 512))] for _ in range(8)]
    once = _seconds(None, part, whole, group, layers)
    layers *= _agreed(1 + int(2 * alone / len(kinds) / once))
    rounds = [[_seconds(kind, part, whole, group, layers) for kind in (None, *kinds)] for _ in range(_LEAST_REPEATS)]
    products, *beside = [statistics.median(times) for times in zip(*rounds, strict=True)]
    return max(0.0, sum(beside) - len(kinds) * products) / alone


def _agreed(number: int) -> int:
    """Return the first rank's number."""
    value = torch.tensor([int(number)])
    dist.broadcast(value, src=0)
    return int(value.item())


def _slowest(seconds: Sequence[float]) -> list[float]:
    """Return, for each time, the maximum over all ranks of the default group."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [float(value) for value in values]

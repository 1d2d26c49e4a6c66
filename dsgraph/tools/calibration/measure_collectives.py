"""Measures the time of collectives: those that passes choose among, in the form in which graphs run them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

import torch
import torch.distributed as dist
from torch import Tensor

from dsgraph.compiler.costs.calibration_record import LinkRecord
from dsgraph.inductor_ext import backend_name, c10d_functional
from dsgraph.passes.ir.collectives import TABLE, Collective, Role

from .device import synchronize
from .fit_line import fit_line

# Bytes of the whole tensor: of all rows that are gathered, scattered, exchanged or summed up.
SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 25)
_MORE_SIZES = {"nccl": (1 << 26, 1 << 27, 1 << 28)}  # NVLink reaches its rate with these alone
_MOST_REPEATS, _LEAST_REPEATS, _DELAY_REPEATS = 25, 3, 5
_LEAST_SIZES = 4
_LAYER = 1 << 22  # bytes of a large layer: beside larger messages, computation is delayed less

_Products = Sequence[Sequence[Tensor]]  # pairs of matrices

KINDS = tuple(kind for kind in TABLE.entries if kind.start is not None)


def measure_collectives(
    group: dist.ProcessGroup, *, device_type: str, seconds: float, hosts: int = 1, kinds: Sequence[Collective] = KINDS
) -> list[LinkRecord]:
    """Measure kinds of collectives over a group, from small tensors to large ones until the time is over.

    The kinds take turns, so that what disturbs the machine for a while disturbs them alike. All ranks of the default
    group call it, each with a group of its own; the first rank decides for all.

    Args:
        group: Over which ranks; two or more.
        device_type: Where the tensors lie.
        seconds: How long it may take; the four smallest sizes are measured in any case.
        hosts: Number of hosts of the group's ranks.
        kinds: What to measure.

    Returns:
        A record for each kind. The delay is that of all kinds together, beside the products of a layer.
    """
    backend = dist.get_backend(group)
    kinds = [kind for kind in kinds if kind.only_on in ("", backend)]
    end = time.perf_counter() + seconds
    samples: dict[str, list[tuple[int, float]]] = {kind.kind: [] for kind in kinds}
    turn = 0.0  # seconds that one call of every kind takes
    lost = spent = 0.0  # seconds of delay, and of the collectives that caused it
    sizes = SIZES + _MORE_SIZES.get(backend, ())
    for number, size in enumerate(sizes):
        guess = turn * size / sizes[number - 1]
        least = guess * (_LEAST_REPEATS + (size <= _LAYER) * 4 * _DELAY_REPEATS)
        if not _agreed(number < _LEAST_SIZES or time.perf_counter() + least < end):
            break
        rows = max(1, size // (4 * group.size()))
        part = torch.ones(rows, device=device_type)
        whole = torch.ones(rows * group.size(), device=device_type)
        # The first call brings memory and connections.
        turn = sum(_seconds(kind, part, whole, group) for kind in kinds)
        fair = (end - time.perf_counter()) / (len(sizes) - number) / 2  # the other half is for the delay
        repeats = _agreed(min(_MOST_REPEATS, max(_LEAST_REPEATS, int(fair / turn))))
        turns = [[_seconds(kind, part, whole, group) for kind in kinds] for _ in range(repeats)]
        medians = _slowest([statistics.median(times) for times in zip(*turns, strict=True)])
        if size <= _LAYER:
            lost, spent = lost + _delay(kinds, part, whole, group, max(medians)), spent + sum(medians)
        for kind, median in zip(kinds, medians, strict=True):
            samples[kind.kind].append((sent_bytes(kind, part, whole, group.size()), median))
    place = backend_name(group, device_type), group.size(), hosts
    lines = {kind: asdict(fit_line(found)) | {"samples": tuple(found)} for kind, found in samples.items()}
    delay = max(0.0, lost) / spent
    return [LinkRecord(*place, kind, **line, time=now(), delay=delay) for kind, line in lines.items()]


def now() -> str:
    """Return the time, ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def start(kind: Collective, part: Tensor, whole: Tensor, ranks: int, group: str) -> Tensor:
    """Start a collective of this rank's part `[rows]`, or of the whole `[ranks * rows]`."""
    assert kind.start is not None, f"{kind.kind} is not measured"
    return kind.start(part if kind.role is Role.GATHER else whole, ranks, group)


def sent_bytes(kind: Collective, part: Tensor, whole: Tensor, ranks: int) -> int:
    """Return the bytes that each rank sends for it."""
    counted = part if kind.role is Role.GATHER or kind.counts_result else whole
    return kind.sent_bytes(counted.nbytes, ranks) or 0


def _seconds(
    kind: Collective | None, part: Tensor, whole: Tensor, group: dist.ProcessGroup, products: _Products = ()
) -> float:
    """Return how long a collective takes from its start to its end, with matrix products beside it."""
    began = time.perf_counter()
    started = [start(kind, part, whole, group.size(), group.group_name)] if kind is not None else []
    for left, right in products:
        torch.mm(left, right)
    for result in started:
        c10d_functional.wait_tensor(result)
    synchronize(part.device.type)
    return time.perf_counter() - began


def _delay(kinds: Sequence[Collective], part: Tensor, whole: Tensor, group: dist.ProcessGroup, longest: float) -> float:
    """Return how many seconds longer products take beside collectives, of which one takes `longest` at most.

    Ranks wait for each other at the end of a collective, which counts: so they do in training.
    """
    rows, side = (256, 512) if part.device.type == "cpu" else (4096, 4096)  # of a layer; more bytes than a core caches
    products = [[torch.ones(size, side, device=part.device) for size in (rows, side)] for _ in range(8)]
    products *= _agreed(1 + int(2 * longest / _seconds(None, part, whole, group, products)))
    turns = [[_seconds(kind, part, whole, group, products) for kind in (None, *kinds)] for _ in range(_DELAY_REPEATS)]
    alone, *beside = [statistics.median(times) for times in zip(*turns, strict=True)]
    return sum(beside) - len(kinds) * alone


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

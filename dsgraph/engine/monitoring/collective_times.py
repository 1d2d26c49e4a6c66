"""Times of gathers and reductions, which run beside the computation: the part of `wall_clock_breakdown` inside graphs.

They run inside compiled graphs, where the engine has no code. So torch's profiler watches one step, and its events are
added up by kind:

    op on the CPU         its transfers           kernels on a GPU
    dsgraph::gather_...   gloo:send, gloo:recv    ncclDevKernel_AllGather_...
    ...reduce_scatter...  gloo:all_reduce, ...    ncclDevKernel_ReduceScatter_...
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dsgraph.compat.autograd import profiler_runs
from dsgraph.passes.analysis.quiet import without_library_output

GATHER, REDUCE = "gather", "reduce"
# An exchange of equal parts is how gloo scatters a sum; Inductor and torch spell the rest in several ways.
_KINDS = {"gather": GATHER, "reduce": REDUCE, "exchange_by_messages": REDUCE, "all_to_all": REDUCE, "alltoall": REDUCE}
_OPS = ("dsgraph::", "_c10d_functional::", "c10d::")
_TRANSFERS = ("gloo:", "mpi:")
_KERNELS = "nccl"


class CollectiveTimes:
    """A timer of collectives, for one step at a time."""

    def __init__(self, device: torch.device) -> None:
        """Create a timer for a device; nothing is measured yet."""
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._watching: profile | None = None

    def begin(self) -> None:
        """Start to measure, unless it does already or another profiler runs."""
        if self._watching is None and not profiler_runs():
            self._watching = profile(activities=self._activities)
            with without_library_output():
                self._watching.__enter__()

    def end(self) -> dict[str, float]:
        """Return the milliseconds in which a gather was running, and a reduction; empty if `begin` did not start."""
        watched, self._watching = self._watching, None
        if watched is None:
            return {}
        with without_library_output():
            watched.__exit__(None, None, None)
        return busy(watched.events() or ())


def busy(events: Iterable[Any]) -> dict[str, float]:
    """Return the milliseconds in which a gather was running, and a reduction, by the events of a profile."""
    ops: list[tuple[float, str]] = []
    transfers, kernels = [], []
    for event in events:
        if event.name.startswith(_OPS) and (kind := _kind(event.name)):
            ops.append((event.time_range.start, kind))
        elif event.name.startswith(_TRANSFERS):
            transfers.append(event)
        elif event.name.startswith(_KERNELS) and event.device_type != torch.autograd.DeviceType.CPU:
            kernels.append(event)
    ops.sort()
    starts = [start for start, _ in ops]
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in kernels or transfers:
        kind = _kind(event.name.lower())
        number = bisect_right(starts, event.time_range.start) - 1
        if kind is None and number >= 0:  # a message, which is of the op that has just begun
            kind = ops[number][1]
        if kind is not None:
            spans[kind].append((event.time_range.start, event.time_range.end))
    return {kind: _covered(spans[kind]) / 1000 for kind in (GATHER, REDUCE)}


def _kind(name: str) -> str | None:
    return next((kind for word, kind in _KINDS.items() if word in name), None)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasts."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total

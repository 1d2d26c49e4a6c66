"""Bytes that a rank sends, from the collectives that really ran: a graph's, those of DDP's reducer and of all peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Collective:
    """A collective that ran.

    Attributes:
        op: Its name in torch's dispatcher, without `c10d::`.
        argument_bytes: Bytes of each of its arguments, 0 for one that is no tensor or list of tensors.
    """

    op: str
    argument_bytes: tuple[int, ...]


# Op -> (its tensor argument that counts, bytes sent a rank per byte of it, given the number of ranks). These are the
# least that any algorithm must send, so that they compare what was asked for, not how well a backend does it. gloo
# performs a reduce-scatter as an all-reduce, which is twice as much. Where ranks differ (broadcast), the mean.
_RULES: dict[str, tuple[int, Callable[[int], float]]] = {
    "allreduce_": (0, lambda n: 2 * (n - 1) / n),
    "allreduce_coalesced_": (0, lambda n: 2 * (n - 1) / n),
    "allgather_": (1, lambda n: n - 1),  # of the input: a shard
    "_allgather_base_": (1, lambda n: n - 1),
    "allgather_into_tensor_coalesced_": (1, lambda n: n - 1),
    "reduce_scatter_": (0, lambda n: n - 1),  # of the output: a shard
    "_reduce_scatter_base_": (0, lambda n: n - 1),
    "reduce_scatter_tensor_coalesced_": (0, lambda n: n - 1),
    "alltoall_base_": (1, lambda n: (n - 1) / n),
    "broadcast_": (0, lambda n: (n - 1) / n),
    "reduce_": (0, lambda n: (n - 1) / n),
    "send": (0, lambda n: 1),
    "recv_": (0, lambda n: 0),
    "barrier": (0, lambda n: 0),
    "monitored_barrier_": (0, lambda n: 0),
}


def record_collectives(run: Callable[[], object]) -> list[Collective]:
    """Call `run` under the profiler; return the collectives that it ran, in the order in which they began."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    # The private event tree, checked on torch 2.13: public events do not tell the dtypes of lists of tensors.
    assert profiler.profiler is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    return [
        Collective(event.name.removeprefix("c10d::"), tuple(map(_bytes, event.extra_fields.inputs)))
        for event in sorted(_walk(roots), key=lambda event: event.start_time_ns)
        if event.name.startswith("c10d::")
    ]


def sent_bytes(collectives: Iterable[Collective], world: int) -> float | None:
    """Return the bytes that each of `world` ranks must send for these collectives over all of them.

    Returns:
        The sum; None when one of the collectives is of a kind that is not known here.
    """
    total = 0.0
    for collective in collectives:
        if collective.op not in _RULES:
            return None
        argument, factor = _RULES[collective.op]
        total += collective.argument_bytes[argument] * factor(world)
    return total


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)


def _bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_bytes, value))
    if not hasattr(value, "sizes"):
        return 0
    dtype: torch.dtype = value.dtype
    return math.prod(value.sizes) * dtype.itemsize

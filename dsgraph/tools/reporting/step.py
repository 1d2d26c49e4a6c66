"""Traffic of a rank in one training step, from the graphs that such a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from dsgraph.partitioning.state import PartitionState
from dsgraph.tools.dumping.units import UnitRun, runs_of

from .compile_log import CompileEntry
from .traffic import (
    Traffic,
    accumulated_traffic,
    add_up,
    held_traffic,
    refresh_traffic,
    total,
)
from .units import list_units


@dataclass(frozen=True)
class StepPart:
    """The traffic of one graph, or of dsgraph outside any graph, in a step.

    Attributes:
        where: "forward" or "backward" and the function, or what happens outside the graphs.
        times: How many layers share the graph, each of which runs it.
        traffic: Of one run.
    """

    where: str
    times: int
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of a rank in one training step: each graph of the newest compile of each function, run once.

    Attributes:
        sent_bytes: With one forward and one backward. None where it is not known: nothing has run with gradients, a
            graph came from torch's cache, or a collective is of an unknown kind.
        parts: The same by graph.
        accumulated_each_bytes: In each micro-batch of a step under `dsgraph.accumulate`, the last one included. None
            where it is not known: where gradients are reduced once, or stage 3 holds parameters for a step, there are
            other graphs for it, which are compiled when they first run.
        accumulated_once_bytes: Once in such a step, besides. A step of n micro-batches sends n times the former and
            once the latter.
        accumulated_reduces_once: True if gradients are reduced once in such a step, as in stages 0 and 1. Stage 2 does
            what the last `accumulate` was given (`reduce_once`).
    """

    sent_bytes: int | None
    parts: tuple[StepPart, ...]
    accumulated_each_bytes: int | None
    accumulated_once_bytes: int | None
    accumulated_reduces_once: bool


def measure_step(model: nn.Module, states: Sequence[PartitionState], records: Sequence[CompileEntry]) -> StepTraffic:
    """Return the traffic of a step, from a model's state and its compiles."""
    training = [record for record in records if record.training]
    if not training:
        return StepTraffic(None, (), None, None, any(state.reduces_once for state in states))
    at_step = newest(training, accumulating=False)
    refreshed = add_up(item for state in states for item in refresh_traffic(state))
    parts = _parts(at_step, list_units(model, states, at_step))
    if refreshed:
        parts.append(StepPart("gathered copies, fetched after an optimizer step", 1, refreshed))

    keeps_local = any(state.reduces_once for state in states)
    held = held_traffic(states)
    once = add_up([*held, *(item for state in states for item in accumulated_traffic(state))])
    has_graphs_of_its_own = keeps_local or bool(held)
    each = newest(training, accumulating=True) if has_graphs_of_its_own else at_step
    each_parts = _parts(each, list_units(model, states, each))
    known = bool(states) and (not has_graphs_of_its_own or any(record.is_for_accumulation for record in each))
    return StepTraffic(
        sent_bytes=_bytes(at_step, parts),
        parts=tuple(parts),
        accumulated_each_bytes=_bytes(each, each_parts) if known else None,
        accumulated_once_bytes=total([*once, *refreshed]) if known else None,
        accumulated_reduces_once=keeps_local,
    )


def newest(records: Sequence[CompileEntry], *, accumulating: bool) -> list[CompileEntry]:
    """Return the newest compile of each function and module: those for `accumulate`, or the others, if any."""
    found: dict[object, CompileEntry] = {}
    for record in records:
        capture = record.capture
        key = (capture.function, capture.resumes_at, record.module)
        is_such = record.is_for_accumulation == accumulating
        if key not in found or is_such or found[key].is_for_accumulation != accumulating:
            found[key] = record
    return list(found.values())


def _parts(records: Sequence[CompileEntry], units: Sequence[UnitRun]) -> list[StepPart]:
    runs = runs_of(units)
    return [
        StepPart(
            where=f"{graph.phase} of {name_of(record)}",
            times=1 if record.is_step else len(runs.get(record.number, ())),
            traffic=graph.traffic,
        )
        for record in records
        for graph in record.graphs
        if graph.traffic
    ]


def name_of(record: CompileEntry) -> str:
    """Return the captured function, with the line of the graph break before it."""
    return f"{record.capture.function.function}{record.capture.after}"


def _bytes(records: Sequence[CompileEntry], parts: Sequence[StepPart]) -> int | None:
    if any(record.from_cache for record in records):
        return None
    amounts = [(part.times, total(part.traffic)) for part in parts]
    if any(amount is None for _, amount in amounts):
        return None
    return sum(times * (amount or 0) for times, amount in amounts)

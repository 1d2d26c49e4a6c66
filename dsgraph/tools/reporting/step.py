"""Traffic and memory of a rank in one training step, from the graphs that such a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from dsgraph.compat.compiled import compiled_modules
from dsgraph.offload.chunk_sizes import state_chunks, step_buffers
from dsgraph.partitioning.blocks.repeated_blocks import is_block
from dsgraph.partitioning.state import PartitionState, partition_states
from dsgraph.partitioning.transforms.offloaded import trained_parameters
from dsgraph.partitioning.transforms.offloaded_rows import OffloadedRows
from dsgraph.passes.analysis.step_memory import PairMemory, simulate_step

from .compile_log import CompileEntry
from .traffic import (
    Traffic,
    accumulated_traffic,
    add_up,
    block_traffic,
    held_traffic,
    reduced_blocks_traffic,
    refresh_traffic,
    total,
)


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


@dataclass(frozen=True)
class Memory:
    """The predicted memory of a training step: of the same graphs, for an optimizer that keeps two tensors a parameter.

    Attributes:
        peak: The most bytes alive at once.
        where: The part of the step at the peak: "forward of GPT.forward", "optimizer", ...
        node: The node at the peak; empty outside graphs.
        parts: What the peak is made of, in bytes.
        buffers: Those among them that are buffers of transfers to and from disk, which no `memory_limit` counts.
        below: "host" or "disk" -> bytes stored there, by part.
    """

    peak: int
    where: str
    node: str
    parts: dict[str, int]
    buffers: int
    below: dict[str, dict[str, int]]


def predict_memory(model: nn.Module, records: Sequence[CompileEntry]) -> Memory | None:
    """Return the memory of a step; None if nothing has run with gradients, or a graph came from torch's cache.

    Graphs that read the copies which stage 3 holds for a step are preferred: other graphs gather these copies for a
    while.
    """
    training = [record for record in records if record.training]
    at_step = _newest(training, accumulating=any(record.reads_held for record in training))
    shared = _sharing(model, at_step)
    running = [(record, layer) for record in at_step for layer in range(shared[record.number])]
    pairs = [
        # Graphs of one module share its parameters, layers that share a graph have each their own.
        _renamed(record.memory, f"{record.module}, layer {layer}: ")
        for record, layer in running
        if record.memory is not None
    ]
    if not pairs or len(pairs) < len(running):
        return None
    held = max((record.held_gradients for record in at_step), default=0)
    keeps_outputs = any(pair.keeps_outputs for pair in pairs)
    step = simulate_step(pairs, keeps_outputs=keeps_outputs, other_bytes=held)
    found = step.at_peak
    buffers = _buffers(model, pairs, step.buffers)
    phase, _, number = found.name.partition(" ")
    where = f"{phase} of {_name(running[int(number)][0])}" if number else phase
    parts = {**found.composition, **({"buffers": buffers} if buffers else {})}
    below = {tier: dict(amounts) for tier, amounts in step.below.items()}
    return Memory(found.bytes + buffers, where, found.node, parts, buffers, below)


def _buffers(model: nn.Module, pairs: Sequence[PairMemory], graph_buffers: int) -> int:
    """Return the buffer bytes of a step.

    The step updates parameters on disk when the earlier steps did: during the backward, or after it.
    """
    parts = [part for part in partition_states(model) if part.arguments.offload.optimizer == "disk"]
    chunks = []
    if parts:
        trained = [rows for part in parts for rows in trained_parameters(part)]
        chunks = state_chunks(trained, parts[0].arguments.offload.optimizer_ratio)
    offloaded = [entry.find(OffloadedRows) for part in parts for entry in part.parameters]
    if not any(rows.stored.stepped_during_backward for rows in offloaded if rows is not None):
        return step_buffers(chunks, graph_buffers)
    stores = [(_local(pair.params[moment.rows].name), moment.buffers) for pair in pairs[::-1] for moment in pair.stores]
    return step_buffers(chunks, graph_buffers, stores=stores)


def _local(name: str) -> str:
    """Return a parameter's name as graphs know it, without what `_renamed` puts before it."""
    return name.partition(": ")[2]


def _renamed(pair: PairMemory, prefix: str) -> PairMemory:
    """Return the same with other names: those of a captured graph are local to the module that was captured."""
    return replace(
        pair,
        params={node: replace(info, name=prefix + info.name) for node, info in pair.params.items()},
        unread=tuple(replace(info, name=prefix + info.name) for info in pair.unread),
        gathered_copies={node: prefix + name for node, name in pair.gathered_copies.items()},
        gradients={prefix + name: piece for name, piece in pair.gradients.items()},
    )


def measure_step(model: nn.Module, states: Sequence[PartitionState], records: Sequence[CompileEntry]) -> StepTraffic:
    """Return the traffic of a step, from a model's state and its compiles."""
    training = [record for record in records if record.training]
    if not training:
        return StepTraffic(None, (), None, None, any(state.reduces_once for state in states))
    at_step = _newest(training, accumulating=False)
    shared = _sharing(model, at_step)
    refreshed = add_up(item for state in states for item in refresh_traffic(state))
    ahead = _ahead(states)
    parts = [*_parts(at_step, shared), *ahead]
    if refreshed:
        parts.append(StepPart("gathered copies, fetched after an optimizer step", 1, refreshed))

    keeps_local = any(state.reduces_once for state in states)
    held = held_traffic(states[0]) if len(states) == 1 else ()
    once = add_up([*held, *(item for state in states for item in accumulated_traffic(state))])
    has_graphs_of_its_own = keeps_local or bool(held)
    each = _newest(training, accumulating=True) if has_graphs_of_its_own else at_step
    known = bool(states) and (not has_graphs_of_its_own or any(record.is_for_accumulation for record in each))
    return StepTraffic(
        sent_bytes=_bytes(at_step, parts),
        parts=tuple(parts),
        accumulated_each_bytes=_bytes(each, [*_parts(each, _sharing(model, each)), *ahead]) if known else None,
        accumulated_once_bytes=total([*once, *refreshed]) if known else None,
        accumulated_reduces_once=keeps_local,
    )


def _ahead(states: Sequence[PartitionState]) -> list[StepPart]:
    gathered = add_up(item for state in states for item in block_traffic(state))
    reduced = add_up(item for state in states for item in reduced_blocks_traffic(state))
    parts = (("gathers of blocks, between graphs", gathered), ("reductions of blocks, between graphs", reduced))
    return [StepPart(name, 1, traffic) for name, traffic in parts if traffic]


def _newest(records: Sequence[CompileEntry], *, accumulating: bool) -> list[CompileEntry]:
    """Return the newest compile of each function and module: those for `accumulate`, or the others, if any."""
    found: dict[object, CompileEntry] = {}
    for record in records:
        capture = record.capture
        key = (capture.function, capture.resumes_at, record.module)
        is_such = record.is_for_accumulation == accumulating
        if key not in found or is_such or found[key].is_for_accumulation != accumulating:
            found[key] = record
    return list(found.values())


def _sharing(model: nn.Module, records: Sequence[CompileEntry]) -> dict[int, int]:
    """Record number -> layers that run it: those compiled for themselves that have no graph of their own."""
    blocks = [module for module in model.modules() if is_block(module)]
    compiled = {id(module): module for module in (*compiled_modules(model), *blocks)}
    own = {record.module for record in records}
    counts = {record.number: 1 for record in records}
    newest = {
        (record.module_type, record.capture.function, record.capture.resumes_at): record
        for record in records
        if record.module in compiled
    }
    for (kind, *_), record in newest.items():
        counts[record.number] += sum(type(module) is kind and key not in own for key, module in compiled.items())
    return counts


def _parts(records: Sequence[CompileEntry], times: dict[int, int]) -> list[StepPart]:
    return [
        StepPart(f"{graph.phase} of {_name(record)}", times[record.number], graph.traffic)
        for record in records
        for graph in record.graphs
        if graph.traffic
    ]


def _name(record: CompileEntry) -> str:
    capture = record.capture
    return capture.function.function + (f" after line {capture.resumes_at}" if capture.resumes_at else "")


def _bytes(records: Sequence[CompileEntry], parts: Sequence[StepPart]) -> int | None:
    if any(record.from_cache for record in records):
        return None
    amounts = [(part.times, total(part.traffic)) for part in parts]
    if any(amount is None for _, amount in amounts):
        return None
    return sum(times * (amount or 0) for times, amount in amounts)

"""The predicted memory of a rank in one training step, from the graphs that such a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from dsgraph.compiler.capture import state_tier
from dsgraph.offload.chunk_sizes import state_chunks, step_buffers
from dsgraph.partitioning.state import PartitionState
from dsgraph.partitioning.transforms.offloaded import OffloadedRows, trained_parameters
from dsgraph.passes.analysis.pair_memory import PairMemory
from dsgraph.passes.analysis.step_memory import StepMemory, simulate_runs, simulate_step

from .compile_log import CompileEntry
from .step import name_of, newest
from .units import list_units


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


@dataclass(frozen=True)
class _Run:
    """A run of a graph in a step, by a module."""

    record: CompileEntry
    module: str

    @property
    def where(self) -> str:
        return name_of(self.record) + (f" in {self.module}" if self.record.unit.block else "")

    def pair(self) -> PairMemory | None:
        """Return the memory of the graph, with the parameters' names in the model."""
        found = self.record.memory
        if found is None:
            return None
        return replace(
            found,
            params={node: replace(info, name=self._name(info.name)) for node, info in found.params.items()},
            gathered_copies={node: self._name(name) for node, name in found.gathered_copies.items()},
            gradients={self._name(name): piece for name, piece in found.gradients.items()},
            unread=(),
            unread_copies=0,
        )

    def _name(self, local: str) -> str:
        shared = self.record.parameters.get(local)
        return self.record.unit.name_in(self.module, shared) if shared else f"{self.record.module}: {local}"


def predict_memory(
    model: nn.Module, states: Sequence[PartitionState], records: Sequence[CompileEntry]
) -> tuple[Memory | None, str]:
    """Return the memory of a step; None, and why, if it is not known."""
    runs = _runs(model, states, [record for record in records if record.in_step and not record.is_step])
    pairs = [pair for run in runs if (pair := run.pair()) is not None]
    if not any(run.record.training for run in runs):
        return None, ""
    blocks = {block.name: block.memory() for state in states for block in state.step.ran()}
    staying = [block for state in states for block in state.step.staying()[:-1]]  # the last one is part of the plan
    copies = sum(blocks[block.name].copies for block in staying)
    limited = {run.record.number: run for run in runs if run.record.needs is not None and run.record.needs.is_block}
    if limited:
        return max((_of_limited_blocks(run, copies) for run in limited.values()), key=lambda found: found.peak), ""
    if len(pairs) < len(runs):
        cached = dict.fromkeys(run.record.number for run in runs if run.record.from_cache)
        numbers = ", ".join(map(str, cached))
        why = f"the graphs of compile {numbers} came from torch's cache" if cached else "a graph was not measured"
        return None, why
    read = {info.name for pair in pairs for info in pair.params.values()}
    unread = (entry for state in states for entry in state.parameters if entry.name not in read)
    eager = [entry for entry in unread if entry.eager_reads and entry.param.requires_grad]
    step = simulate_step(
        [_with_unread(pairs[0], states, read), *pairs[1:]],
        keeps_outputs=any(pair.keeps_outputs for pair in pairs),
        other_bytes=max(run.record.held_gradients for run in runs),
        held={
            "gradients": sum(entry.gradient_bytes for entry in eager),
            "gathered copies": copies,
        },
        blocks=[blocks.get(run.module) if run.record.unit.block else None for run in runs],
        gathers_ahead=all(state.step.gathers_ahead for state in states),
    )
    return _memory(step, runs, _buffers(states, pairs, step.buffers)), ""


def _of_limited_blocks(run: _Run, copies: int) -> Memory:
    """Return the memory of a step as it was planned for the blocks that share a graph.

    Args:
        run: A run of the graph.
        copies: Bytes of gathered parameters that stay for the backward.
    """
    memory, needs = run.record.memory, run.record.needs
    assert memory is not None and needs is not None
    step = simulate_runs(memory, replace(needs, held={**needs.held, "gathered copies": copies}))
    return _memory(step, [run], 0)


def _runs(model: nn.Module, states: Sequence[PartitionState], records: Sequence[CompileEntry]) -> list[_Run]:
    """Return the graphs that a step runs, in order."""
    at_step = newest(records, accumulating=False)
    by_number = {record.number: record for record in at_step}
    return [
        _Run(by_number[numbers[-1]], module)
        for unit in list_units(model, states, at_step)
        for module in unit.modules
        for numbers in unit.graphs
    ]


def _with_unread(pair: PairMemory, states: Sequence[PartitionState], read: set[str]) -> PairMemory:
    """Return the memory of a graph, with that of all parameters of the model that no graph reads from their shards."""
    unread = [(state, entry) for state in states for entry in state.parameters if entry.name not in read]
    specs = [
        replace(entry.current_spec(), **state_tier(state, device_type=entry.param.device.type))
        for state, entry in unread
    ]
    copies = [entry.gathered_copy for _, entry in unread]
    held = sum(copy.untyped_storage().nbytes() for copy in copies if copy is not None)
    return replace(pair, unread=tuple(specs), unread_copies=held)


def _memory(step: StepMemory, runs: Sequence[_Run], buffers: int) -> Memory:
    found = step.at_peak
    phase, _, number = found.name.partition(" ")
    return Memory(
        peak=found.bytes + buffers,
        where=f"{phase} of {runs[int(number)].where}" if number.isdigit() else found.name,
        node=found.node,
        parts={**found.composition, **({"buffers": buffers} if buffers else {})},
        buffers=buffers,
        below={tier: dict(amounts) for tier, amounts in step.below.items()},
    )


def _buffers(states: Sequence[PartitionState], pairs: Sequence[PairMemory], graph_buffers: int) -> int:
    """Return the buffer bytes of a step.

    The step updates parameters on disk when the earlier steps did: during the backward, or after it.
    """
    parts = [part for part in states if part.arguments.offload.optimizer == "disk"]
    chunks = []
    if parts:
        trained = [rows for part in parts for rows in trained_parameters(part)]
        chunks = state_chunks(trained, parts[0].arguments.offload.optimizer_ratio)
    offloaded = [entry.find(OffloadedRows) for part in parts for entry in part.parameters]
    if not any(rows.stored.stepped_during_backward for rows in offloaded if rows is not None):
        return step_buffers(chunks, graph_buffers)
    stores = [(pair.params[moment.rows].name, moment.buffers) for pair in pairs[::-1] for moment in pair.stores]
    return step_buffers(chunks, graph_buffers, stores=stores)

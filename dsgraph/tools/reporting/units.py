"""The units of a training step in the report, and how its graph gathers the parameters of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from dsgraph.compat.autograd import has_hooks
from dsgraph.partitioning.blocks.block import Block
from dsgraph.partitioning.blocks.unit import Unit as UnitOfGraph
from dsgraph.partitioning.blocks.unit import unit_in
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import PartitionState
from dsgraph.tools.dumping.render import listed
from dsgraph.tools.dumping.units import UnitGraph, UnitRun, spelled, units_of

from .compile_log import CompileEntry
from .traffic import Traffic, gather_of_block, reduction_of_block


@dataclass(frozen=True)
class Unit(UnitRun):
    """A unit of a training step: equal blocks that share graphs, or a module around the blocks.

    Attributes:
        function: The captured function, as `file:line (name)`.
        parameters: The parameters that the graphs read, by their names in the model; `*` stands for the number of the
            block.
        is_planned: True if the graph of the step gathers its parameters and reduces their gradients.
        copy_bytes: Bytes of the full parameters of one block, which it gathers.
        gather: The traffic of gathering them once.
        reduction: The traffic of reducing the gradients of one block.
    """

    function: str
    parameters: tuple[str, ...]
    is_planned: bool = False
    copy_bytes: int = 0
    gather: tuple[Traffic, ...] = ()
    reduction: tuple[Traffic, ...] = ()


@dataclass(frozen=True)
class PlanException:
    """Blocks or parameters that the graph of the step leaves out, and why."""

    what: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The gathers of blocks in the graph of a step.

    Attributes:
        gathers_ahead: True if parameters are gathered while units before them compute.
        blocks: Number of blocks that it gathers.
        kept: The blocks whose full parameters stay from their forward to their backward.
        kept_bytes: Their bytes.
        exceptions: What it leaves out.
    """

    gathers_ahead: bool
    blocks: int
    kept: str
    kept_bytes: int
    exceptions: tuple[PlanException, ...]


def list_units(model: nn.Module, states: Sequence[PartitionState], records: Sequence[CompileEntry]) -> tuple[Unit, ...]:
    """Return the units of a training step in order; none without graphs that ran with gradients enabled."""
    modules = {id(module): module for module in model.modules()}
    known = {record.number: record for record in records if record.in_step and not record.is_step}
    graphs = [
        _graph(record, record.unit if record.unit.module else unit_in(model, modules.get(record.module)))
        for record in known.values()
    ]
    planned = {block.name: (state, block) for state in states for block in state.step.ran()}
    idle = {block.name for state in states for block in state.step.blocks} - planned.keys()
    return tuple(_unit(run, known, planned) for run in units_of(graphs, ahead=tuple(planned), without=idle))


def _graph(record: CompileEntry, unit: UnitOfGraph) -> UnitGraph:
    capture = record.capture
    after = f" after line {capture.resumes_at}" if capture.resumes_at else ""
    return UnitGraph(record.number, f"{capture.function}{after}", unit.module, unit.block, unit.blocks)


def _unit(
    run: UnitRun,
    records: dict[int, CompileEntry],
    planned: dict[str, tuple[PartitionState, Block]],
) -> Unit:
    own = [records[number] for compiles in run.graphs for number in compiles]
    unit = Unit(
        **vars(run),
        function=str(own[0].capture.function),
        parameters=tuple(dict.fromkeys(name for record in own for name in record.parameters.values())),
    )
    if not run.is_block or run.modules[0] not in planned:
        return unit
    state, block = planned[run.modules[0]]
    return replace(
        unit,
        is_planned=True,
        copy_bytes=sum(entry.copy_bytes for entry in block.entries),
        gather=gather_of_block(state, block),
        reduction=reduction_of_block(state, block),
    )


def plan_of(states: Sequence[PartitionState]) -> Plan | None:
    """Return how the blocks that ran in the last step are gathered; None if there are none."""
    plans = [state for state in states if state.step.ran()]
    if not plans:
        return None
    ran = [block for state in plans for block in state.step.ran()]
    stay = [block for state in plans for block in state.step.staying()]
    return Plan(
        gathers_ahead=all(state.step.gathers_ahead for state in plans),
        blocks=len(ran),
        kept=spelled([block.name for block in stay]),
        kept_bytes=sum(entry.copy_bytes for block in stay for entry in block.entries),
        exceptions=tuple(exception for state in plans for exception in _exceptions(state)),
    )


def _exceptions(state: PartitionState) -> Iterator[PlanException]:
    ran = state.step.ran()
    if state.step.left:
        yield PlanException("some steps", f"left the graph of the step: {listed(dict.fromkeys(state.step.left))}")
    idle = [block.name for block in state.step.blocks if block not in ran]
    if idle:
        yield PlanException(
            spelled(idle),
            "did not run as graphs of their own in the last forward: skipped, or in the graph of their caller, as in a "
            "checkpoint, in control flow, or with an argument that is an object",
        )
    entries = [entry for block in ran for entry in block.entries]
    held = [entry.name for entry in entries if entry.is_held_for_step]
    if held:
        yield PlanException(listed(held), "gathered once a step inside accumulate, by the graphs that read them")
    trained = [entry for block in ran for entry in block.trained()]
    hooked = [entry.name for entry in trained if has_hooks(entry.param)]
    if hooked:
        yield PlanException(listed(hooked), "the gradient is waited for at once, because the parameter has a hook")
    known = {id(entry) for block in ran for entry in (*block.entries, *block.replicated)}
    others = dict.fromkeys(entry.name for entry in _parameters_inside(state, ran) if id(entry) not in known)
    if others:
        yield PlanException(listed(others), "gathered by the graphs that read them: on disk")


def _parameters_inside(state: PartitionState, blocks: Sequence[Block]) -> Iterator[ParameterState]:
    """Yield the parameters of the modules of blocks, also those that belong to another block."""
    owners = {owner: entry for entry in state.parameters for owner in entry.owners}
    for block in blocks:
        for module in state.root.get_submodule(block.name).modules():
            for attribute in module._parameters:
                entry = owners.get((module, attribute))
                if entry is not None:
                    yield entry

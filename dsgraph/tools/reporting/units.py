"""The units of a training step in the report."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dsgraph.partitioning.blocks.unit import unit_in
from dsgraph.partitioning.state import PartitionState
from dsgraph.tools.dumping.units import UnitGraph, UnitRun, units_of

from .compile_log import CompileEntry


def list_units(
    model: nn.Module, states: Sequence[PartitionState], records: Sequence[CompileEntry]
) -> tuple[UnitRun, ...]:
    """Return the units of a training step in order; none without graphs that ran with gradients enabled."""
    modules = {id(module): module for module in model.modules()}
    graphs = []
    for record in records:
        if record.in_step and not record.is_step:
            unit = record.unit if record.unit.module else unit_in(model, modules.get(record.module))
            function = f"{record.capture.function}{record.capture.after}"
            graphs.append(UnitGraph(record.number, function, unit.module, unit.block, unit.blocks))
    ran = [block.name for state in states for block in state.step.ran()]
    idle = {block.name for state in states for block in state.step.blocks}.difference(ran)
    return units_of(graphs, ahead=ran, without=idle)

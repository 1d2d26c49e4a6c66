"""The units of a training step in a dump, and the number of times that a step runs a graph."""

from __future__ import annotations

from collections.abc import Iterable

from dsgraph.tools.dumping.records import CompileRecord
from dsgraph.tools.dumping.units import UnitGraph, UnitRun, spelled, units_of

from .dumps import Dump, GraphName


def step_units(compiles: Iterable[CompileRecord]) -> tuple[UnitRun, ...]:
    """Return the units of a training step, from the compiles of a rank."""
    return units_of(
        [
            UnitGraph(record.compile, record.function, record.module, record.block, record.blocks)
            for record in compiles
            if record.in_step and not record.is_step
        ]
    )


def modules_that_run(dump: Dump, name: GraphName) -> tuple[str, ...]:
    """Return the modules that run a graph in a training step; none for an older compile, or one without gradients."""
    units = step_units(dump.compiles(name.rank))
    return tuple(module for unit in units for own in unit.graphs if own[-1] == name.compile for module in unit.modules)


def runs_text(modules: tuple[str, ...]) -> str:
    """Return a remark on a graph that several modules run."""
    return f", run {len(modules)} times in a step: by {spelled(modules)}" if len(modules) > 1 else ""

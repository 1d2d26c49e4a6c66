"""The section of a report that shows a training step as a sequence of units, and how its graph gathers them."""

from __future__ import annotations

from collections.abc import Sequence

from dsgraph.partitioning.blocks.block_frames import ITS_OWN_FRAME
from dsgraph.tools.dumping.render import bytes_text, listed
from dsgraph.tools.dumping.units import graphs_text, spelled

from .layout import short, table, wrap
from .report_record import Compile, ReportRecord
from .traffic import Traffic, total
from .units import Plan, Unit

_IN_GRAPH = "in the graph"


def write_units(report: ReportRecord) -> str:
    """Return the section; empty for a step without blocks that are graphs of their own."""
    if not any(unit.is_block for unit in report.units):
        return ""
    compiles = {item.number: item for item in report.compiles}
    runs = sum(len(unit.modules) for unit in report.units)
    rows = [_row(unit, compiles) for unit in report.units]
    headers = ("", "runs", "compile", "nodes", "parameters", "gradients")
    lines = [f"a training step runs {runs} units", table(rows, headers)]
    lines += _uncompiled(report)
    lines += [] if report.plan is None else _plan(report.plan)
    return "\n".join(lines)


def _row(unit: Unit, compiles: dict[int, Compile]) -> tuple[object, ...]:
    own = [compiles[numbers[-1]] for numbers in unit.graphs]
    counts = ", ".join(f"{phase} {found}" for phase in ("forward", "backward") if (found := _nodes(own, phase)))
    name = spelled(unit.modules) if unit.is_block else unit.modules[0] or short(unit.function).rpartition("(")[2][:-1]
    return (name, len(unit.modules), graphs_text(unit), counts or "?", *_communication(unit, own))


def _nodes(own: Sequence[Compile], phase: str) -> str:
    return " + ".join(str(graph.nodes) for item in own for graph in item.graphs if graph.phase == phase)


def _communication(unit: Unit, own: Sequence[Compile]) -> tuple[str, str]:
    """Return how the parameters of a unit are gathered, and how its gradients are reduced."""
    if unit.is_planned:
        return _amount("gathered", unit.gather), _amount("reduced", unit.reduction)
    sends = {graph.phase: total(graph.traffic) for item in own for graph in item.graphs if graph.traffic}
    return tuple(_IN_GRAPH if phase in sends else "" for phase in ("forward", "backward"))  # type: ignore[return-value]


def _amount(verb: str, traffic: Sequence[Traffic]) -> str:
    count = sum(item.count for item in traffic)
    return f"{count} {verb}: {bytes_text(total(traffic))}" if count else ""


def _uncompiled(report: ReportRecord) -> list[str]:
    """Return the functions that call blocks, which run uncompiled, and what is read there."""
    callers = [item for item in report.fallbacks if item.what and ITS_OWN_FRAME in item.reason]
    read = [item.what for item in report.fallbacks if item.kind == "parameter read eagerly"]
    if not callers and not read:
        return []
    functions = listed(dict.fromkeys(f"{item.what} ({short(item.place).partition(' (')[0]})" for item in callers))
    reads = f"; parameters read outside graphs: {listed(read)}" if read else ""
    return [wrap(f"uncompiled code between the units: {functions or 'in the model'}{reads}")]


def _plan(plan: Plan) -> list[str]:
    how = (
        "parameters are gathered while units before them compute, and gradients reduced while others compute"
        if plan.gathers_ahead
        else "each is gathered when it runs, and its gradients are waited for at once, because of overlap_comm=False"
    )
    kept = (
        f"parameters that stay gathered from the forward to the backward: {bytes_text(plan.kept_bytes)} of {plan.kept}"
    )
    return [
        wrap(f"{plan.blocks} blocks, by the graph of the step: {how}", kept),
        *(wrap(f"- {item.what}: {item.reason}") for item in plan.exceptions),
    ]

"""A report as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from dsgraph.passes.memory.fit import PLANNED
from dsgraph.passes.memory.offload import OffloadActivations
from dsgraph.tools.dumping.render import bytes_text
from dsgraph.tools.dumping.units import runs_of, runs_text

from .activity import PassNote
from .measure import Activations
from .predicted_memory import Memory
from .report_record import Compile, Parameter, ReportRecord

WIDTH = 100


def table(rows: Iterable[tuple[object, ...]], headers: Sequence[str]) -> str:
    """Return rows under their headers."""
    return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)


def short(place: str) -> str:
    """Return a place with one folder: `/home/me/project/model.py:12 (f)` -> `project/model.py:12 (f)`."""
    head, separator, tail = place.partition(":")
    return str(Path(*Path(head).parts[-2:])) + separator + tail


def fit(text: str, width: int) -> str:
    """Return the text, shortened at its front except for "forward of" and "backward of"."""
    head = next((head for head in ("forward of ", "backward of ") if text.startswith(head)), "")
    rest, room = text.removeprefix(head), width - len(head)
    return text if len(text) <= width else f"{head}...{rest[len(rest) - room + 3 :]}"


def wrap(*lines: str) -> str:
    """Return lines of at most `WIDTH` columns."""
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


_TITLES = {PLANNED: "activations", OffloadActivations().name: "offloaded"}


def write_report(report: ReportRecord) -> str:
    """Return all sections of a report that have something to say."""
    sections = [
        _head(report),
        _parameters(report.parameters),
        _compiles(report),
        _passes(report.compiles),
        _step(report),
        _activations(report.compiles),
        _memory(report),
        _list("graph breaks", [(f"at {short(item.place)}", item.reason) for item in report.graph_breaks]),
        _list(
            "recompiles",
            [
                (f"compile {item.compile}: {short(item.function)}, time {item.times}", item.reason)
                for item in report.recompiles
            ],
        ),
        _list(
            "fallbacks",
            [
                (
                    f"{item.kind}: {item.what}, {item.count} x" + (f", {short(item.place)}" * bool(item.place)),
                    item.reason,
                )
                for item in report.fallbacks
            ],
        ),
        *(_list(title, _done(report.compiles, title)) for title in ("activations", "offloaded", "kernels")),
        _list("near misses", [(_where(item), item.note) for item in report.near_misses]),
        _list(
            "checkpoint regions",
            [
                (
                    short(item.place),
                    item.problem + ("" if item.saved_bytes is None else f" ({bytes_text(item.saved_bytes)})"),
                )
                for item in report.checkpoint_regions
            ],
        ),
    ]
    return "\n\n".join(section for section in sections if section)


def _done(compiles: Sequence[Compile], title: str) -> Iterator[tuple[str, str]]:
    """Yield what passes did whose lines are listed under a title."""
    for item in compiles:
        for each in item.passes:
            if _TITLES.get(each.name, "kernels") == title:
                yield from ((f"compile {item.number}", line) for line in each.done)


def _where(item: PassNote) -> str:
    numbers = ", ".join(map(str, item.compiles))
    return f"compile{'s' * (len(item.compiles) > 1)} {numbers}, {item.phase}, {item.pass_name}"


def _head(report: ReportRecord) -> str:
    mesh = ", ".join(f"{name} {count}" for name, count in report.mesh.items())
    stages = ", ".join(str(stage) for stage in sorted(set(report.stages)))
    where = f" (ZeRO stage {stages}; mesh: {mesh})" if report.stages else ""
    return wrap(
        f"dsgraph report of {report.model}{where}", report.status, *([f"costs: {report.costs}"] if report.costs else [])
    )


def _parameters(parameters: Sequence[Parameter]) -> str:
    if not parameters:
        return ""
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        replicated = f"replicated: {parameter.replicated_because}"
        kind = f"split over {parameter.split_over}" if parameter.split_over else replicated
        groups.setdefault(kind, []).append(parameter)
    rows = [
        (
            kind,
            len(members),
            bytes_text(sum(item.bytes_full for item in members)),
            bytes_text(sum(item.bytes_here for item in members)),
            bytes_text(sum(item.bytes_copy for item in members)),
        )
        for kind, members in groups.items()
    ]
    lines = ["parameters", table(rows, ("", "count", "full", "on this rank", "gathered copy"))]
    held = [item.name for item in parameters if item.is_held_for_step]
    if held:
        lines.append(wrap(f"gathered once per step inside accumulate: {', '.join(held)}"))
    return "\n".join(lines)


def _compiles(report: ReportRecord) -> str:
    if not report.compiles:
        return ""
    rows = []
    for item in report.compiles:
        after = f" after line {item.resumes_at}" if item.resumes_at else ""
        made = "cache: no passes" if item.from_cache else f"{item.codegen}"
        graphs = ", ".join(f"{graph.phase} {graph.nodes}" for graph in item.graphs) or "?"
        rows.append(
            (
                item.number,
                fit(short(item.function) + after, 30),
                item.kind,
                made,
                graphs,
                f"{1000 * item.pass_seconds:.0f} + {1000 * item.verify_seconds:.0f} ms",
            )
        )
    runs = (f"compile {number}{runs_text(modules)}" for number, modules in runs_of(report.units).items() if modules[1:])
    listing = table(rows, ("", "function", "mode", "codegen", "nodes", "passes, checks"))
    return "\n".join(["compiles", listing, *map(wrap, runs)])


def _passes(compiles: Sequence[Compile]) -> str:
    rows = [
        (
            item.number,
            one.phase,
            one.name,
            one.changed,
            f"{one.nodes_before} -> {one.nodes_after}",
            f"{1000 * one.seconds:.1f}",
        )
        for item in compiles
        for one in item.passes
        if one.changed or one.nodes_before != one.nodes_after
    ]
    idle = sum(len(item.passes) for item in compiles) - len(rows)
    lines = [table(rows, ("compile", "phase", "pass", "changed", "nodes", "ms"))] if rows else []
    if idle:
        lines.append(f"{idle} runs of passes changed nothing")
    return "\n".join(["passes", *lines]) if lines else ""


def _step(report: ReportRecord) -> str:
    step = report.step
    rows = [
        (
            fit(part.where, 32),
            part.times,
            fit(item.kind, 24),
            fit(item.axis, 12),
            item.count,
            bytes_text(item.sent_bytes),
        )
        for part in step.parts
        for item in part.traffic
    ]
    if not rows and step.sent_bytes is None:
        return ""
    lines = [f"a training step: each rank sends {bytes_text(step.sent_bytes)}"]
    if step.accumulated_each_bytes is not None:
        each, once = bytes_text(step.accumulated_each_bytes), bytes_text(step.accumulated_once_bytes)
        how = "accumulate(reduce_once=True)" if 2 in report.stages and step.accumulated_reduces_once else "accumulate"
        lines.append(f"with {how}: {each} per micro-batch and {once} once per step")
    if rows:
        lines.append(table(rows, ("", "runs", "collective", "over", "calls", "sends")))
    return "\n".join(lines)


def _activations(compiles: Sequence[Compile]) -> str:
    rows = [(item.number, *_activation_row(item.activations)) for item in compiles if item.activations is not None]
    heads = ("compile", "saved", "kept parameters", "recomputed", "gathered again")
    names = [
        f"kept by compile {item.number}: {', '.join(item.activations.kept_names)}"
        for item in compiles
        if item.activations is not None and item.activations.kept_names
    ]
    return "\n".join(["for the backward", table(rows, heads), *map(wrap, names)]) if rows else ""


def _activation_row(found: Activations) -> tuple[str, ...]:
    return (
        f"{found.saved}: {bytes_text(found.saved_bytes)}",
        f"{found.kept_parameters}: {bytes_text(found.kept_parameter_bytes)}",
        f"{found.recomputed}: {bytes_text(found.recomputed_bytes)}",
        f"{found.gathered_again}: {bytes_text(found.gathered_again_bytes)}",
    )


def _memory(report: ReportRecord) -> str:
    memory, limit = report.memory, report.memory_limit
    if memory is None:
        unknown = [f"predicted peak memory of a training step: not known, because {report.memory_unknown}"]
        limits = [] if limit is None else [_limit(limit, None, report.limit_gaps)]
        return wrap(*(unknown if report.memory_unknown else []), *limits)
    node = f" at {memory.node}" if memory.node else ""
    return wrap(
        f"predicted peak memory of a training step: {bytes_text(memory.peak)} in {memory.where}{node}",
        f"parts: {_amounts(memory.parts)}; assumes the optimizer is Adam",
        *(f"on {tier} {bytes_text(sum(parts.values()))}: {_amounts(parts)}" for tier, parts in memory.below.items()),
        *([] if limit is None else [_limit(limit, memory, report.limit_gaps)]),
    )


def _amounts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {bytes_text(amount)}" for name, amount in parts.items() if amount)


def _limit(limit: int, memory: Memory | None, gaps: tuple[str, ...]) -> str:
    if gaps:
        return f"memory_limit: {bytes_text(limit)} cannot be promised: {'; '.join(gaps)}"
    if memory is None:
        return f"memory_limit: {bytes_text(limit)}"
    over = memory.peak - memory.buffers - limit
    if over <= 0:
        return f"memory_limit: {bytes_text(limit)}, met by that prediction"
    return (
        f"memory_limit: {bytes_text(limit)} cannot be met: a step is predicted to take {bytes_text(over)} more, "
        "even if nothing is kept for speed"
    )


def _list(title: str, items: Iterable[tuple[str, str]]) -> str:
    lines = []
    for (what, why), count in Counter(items).items():
        again = f" ({count} x)" if count > 1 else ""
        lines.append(textwrap.fill(f"- {what}{again}: {why}", WIDTH, subsequent_indent="  "))
    return "\n".join([title, *lines]) if lines else ""

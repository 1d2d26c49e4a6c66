"""The units of a step, in order, from its compiles: repeated blocks with their graphs, and what is around them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .records import CompileRecord
from .render import listed


@dataclass(frozen=True)
class UnitGraph:
    """A compile, as a part of a unit.

    Attributes:
        compile: Its number.
        function: The captured function, with the line of the graph break that the graph follows.
        module: The module that is called, by its name in the model; empty for the model.
        block: The repeated block that `module` is, or is inside of; empty outside blocks.
        blocks: The blocks that may share the graph.
    """

    compile: int
    function: str
    module: str = ""
    block: str = ""
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnitRun:
    """A unit of a step.

    Attributes:
        modules: The modules that run it, in order: equal blocks, or one module; an empty name for the model.
        graphs: For each of its graphs, the number of the newest compile. Several numbers where a block may run the
            graph of any of several others: Dynamo's guards decide, and their choice is not recorded.
    """

    modules: tuple[str, ...]
    graphs: tuple[tuple[int, ...], ...]


def units_of(
    graphs: Sequence[UnitGraph | CompileRecord], *, ahead: Iterable[str] = (), without: Collection[str] = ()
) -> tuple[UnitRun, ...]:
    """Return the units of a step, each set of graphs once, in the order in which they first ran.

    Args:
        graphs: The compiles of graphs that a step runs, in order.
        ahead: Blocks in the order in which they run, as far as it is known; others follow in the order of the model.
        without: Blocks that do not run as graphs of their own.
    """
    newest: dict[object, dict[str, UnitGraph | CompileRecord]] = {}
    for graph in graphs:  # the place of a graph in its unit is the same for equal blocks
        place = (graph.function, graph.module.removeprefix(graph.block), bool(graph.block))
        newest.setdefault(place, {})[graph.block or graph.module] = graph
    known = dict.fromkeys(block for graph in graphs for block in graph.blocks)
    users: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for block in dict.fromkeys((*(block for block in ahead if block in known), *known)):
        own = tuple(found for compiled in newest.values() if (found := _compiles_for(block, compiled)))
        if own and block not in without:
            users.setdefault(own, []).append(block)
    units = []
    for compiled in newest.values():
        first = {graph.compile for graph in compiled.values()}
        units += [UnitRun((graph.module,), ((graph.compile,),)) for graph in compiled.values() if not graph.block]
        units += [UnitRun(tuple(blocks), own) for own, blocks in users.items() if first.intersection(own[0])]
    return tuple(units)


def _compiles_for(block: str, compiled: Mapping[str, UnitGraph | CompileRecord]) -> tuple[int, ...]:
    """Return a block's own compile among those of equal blocks, or all whose graph it may run."""
    equal = {graph.block: graph.compile for graph in compiled.values() if block in graph.blocks}
    return (equal[block],) if block in equal else tuple(sorted(equal.values()))


def runs_of(units: Iterable[UnitRun]) -> dict[int, tuple[str, ...]]:
    """Return number of a compile -> the modules that run its graphs in a step."""
    found: dict[int, tuple[str, ...]] = {}
    for unit in units:
        for numbers in unit.graphs:
            found[numbers[-1]] = (*found.get(numbers[-1], ()), *unit.modules)
    return found


def runs_text(modules: Sequence[str]) -> str:
    """Return a remark on a graph that several modules run; empty for other graphs."""
    return f", run {len(modules)} times in a step: by {spelled(modules)}" if len(modules) > 1 else ""


def spelled(modules: Sequence[str]) -> str:
    """Return names of modules as text: `layers.0 ... layers.23 (24)`; "the model" for an empty name."""
    if len(modules) < 3:
        return " and ".join(module or "the model" for module in modules)
    parts = [module.rpartition(".") for module in modules]
    numbers = [int(key) for *_, key in parts if key.isdecimal()]
    follow = [numbers[0] + count for count in range(len(parts))] if numbers else None
    if len({parent for parent, *_ in parts}) == 1 and numbers == follow:
        return f"{modules[0]} ... {modules[-1]} ({len(modules)})"
    return listed(modules)

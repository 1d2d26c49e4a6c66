"""The units of a step, in order, from its compiles: repeated blocks with their graphs, and what is around them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

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

    @property
    def place(self) -> tuple[str, str, bool]:
        """The place of the graph in its unit, which is the same for equal blocks."""
        return (self.function, self.module.removeprefix(self.block), bool(self.block))


@dataclass(frozen=True)
class UnitRun:
    """A unit of a step.

    Attributes:
        modules: The modules that run it, in order: equal blocks, or one module; an empty name for the model.
        is_block: True for blocks.
        graphs: For each of its graphs, the number of the newest compile. Several numbers where a block may run the
            graph of any of several others: Dynamo's guards decide, and their choice is not recorded.
        recompiles: Number of earlier compiles of these graphs.
    """

    modules: tuple[str, ...]
    is_block: bool
    graphs: tuple[tuple[int, ...], ...]
    recompiles: int


def units_of(
    graphs: Sequence[UnitGraph], *, ahead: Iterable[str] = (), without: Collection[str] = ()
) -> tuple[UnitRun, ...]:
    """Return the units of a step, each set of graphs once, in the order in which they first ran.

    Args:
        graphs: The compiles of graphs that a step runs, in order.
        ahead: Blocks in the order in which they run, as far as it is known; others follow in the order of the model.
        without: Blocks that do not run as graphs of their own.
    """
    known = dict.fromkeys(block for graph in graphs for block in graph.blocks)
    users: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for block in dict.fromkeys((*(block for block in ahead if block in known), *known)):
        if block in without:
            continue
        users.setdefault(_graphs_of(block, graphs), []).append(block)
    found = [_run(tuple(blocks), own, graphs, is_block=True) for own, blocks in users.items() if own]
    around: dict[object, UnitGraph] = {(*graph.place, graph.module): graph for graph in graphs if not graph.block}
    found += [_run((graph.module,), ((graph.compile,),), graphs, is_block=False) for graph in around.values()]
    return tuple(unit for _, unit in sorted(found, key=lambda item: item[0]))


def _graphs_of(block: str, graphs: Sequence[UnitGraph]) -> tuple[tuple[int, ...], ...]:
    """Return, for each graph of a block, its newest compile; without one of its own, the newest of each equal block."""
    newest: dict[tuple[str, str, bool], dict[str, int]] = {}
    for graph in graphs:
        if block in graph.blocks:
            newest.setdefault(graph.place, {})[graph.block] = graph.compile
    return tuple(
        (compiles[block],) if block in compiles else tuple(sorted(set(compiles.values())))
        for compiles in newest.values()
    )


def _run(
    modules: tuple[str, ...], own: tuple[tuple[int, ...], ...], graphs: Sequence[UnitGraph], *, is_block: bool
) -> tuple[int, UnitRun]:
    """Return a unit, after the number of the compile before which it cannot have run."""
    kinds = {graph.compile: (graph.place, graph.block or graph.module) for graph in graphs}
    again = {number: [other for other in kinds if kinds[other] == kinds[number]] for one in own for number in one}
    first = min(max(min(again[number]) for number in numbers) for numbers in own)
    older = sum(len(compiles) - 1 for compiles in again.values())
    return first, UnitRun(modules, is_block, own, older)


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


def graphs_text(unit: UnitRun) -> str:
    """Return the compiles of a unit's graphs: `1, 2`, and `1 or 3` where it may be either; with recompiles."""
    again = f" ({unit.recompiles} older)" if unit.recompiles else ""
    return ", ".join(" or ".join(map(str, compiles)) for compiles in unit.graphs) + again

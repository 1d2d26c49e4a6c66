"""Finds the node at which two versions of a training graph, before and after a pass, part ways."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from dsgraph.compat.inductor import boxed
from dsgraph.passes.compat import OpOverload, is_tangent
from dsgraph.passes.ir.coalesced import is_result
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.graph import placeholders
from dsgraph.passes.ir.user_source import user_source

from .recorded_call import Difference, Tolerance, difference

_MADE_AT_MOST = 8

Place = tuple[str, str]
"""A node: "forward" or "backward", and its name there."""


class WatchedGraph:
    """A graph as codegen "eager" runs it, whose nodes' values can be looked at."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.kind = "backward" if any(map(is_tangent, placeholders(gm))) else "forward"
        self.look: Callable[[Place, Any], None] | None = None
        self._run = boxed(gm)
        self._boxed_call = True  # AOTAutograd hands over a list of inputs, for them to be freed one by one

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph; node by node if a watcher is set."""
        if self.look is None:
            return self._run(args)
        return _Observed(self.gm, self.kind, self.look).boxed_run(args)


class _Observed(Interpreter):
    def __init__(self, gm: GraphModule, kind: str, look: Callable[[Place, Any], None]) -> None:
        super().__init__(gm)
        self._kind = kind
        self._look = look

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        under_way = is_collective(n) or is_result(n)  # what it gives is there only after a wait
        if n.op != "output" and not under_way:
            self._look((self._kind, n.name), value)
        return value


@dataclass(frozen=True)
class NodeFinding:
    """The first node that is off.

    Attributes:
        graph: "forward" or "backward".
        node: Its name; "output" if the graph returns another node than before and all earlier nodes are right.
        op: What it calls.
        where: The user's `file:line`; empty when unknown.
        code: The text of that line.
        difference: Difference of its value from the value before the pass.
        arguments: Its arguments, where the pass has changed them: before and after.
        made: The nodes that feed it and that the pass has created, nearest first.
    """

    graph: str
    node: str
    op: str
    where: str
    code: str
    difference: Difference
    arguments: tuple[str, str] | None = None
    made: tuple[dict[str, str], ...] = ()


@dataclass
class NodeComparison:
    """Compares two versions of a graph, while they run on the same inputs, node by node.

    Call the older version with `watch_before`, then the newer one with `watch_after`; `found` is the first node, in the
    newer one's order, that both have and that differs.

    Attributes:
        before: Forward and backward before the pass.
        after: The same after it.
        retraced: The pass has rewritten the captured graph, from which these were traced anew, so that names are not
            the same.
        tolerance: What does not count as a difference.
    """

    before: list[WatchedGraph]
    after: list[WatchedGraph]
    retraced: bool
    tolerance: Tolerance
    found: tuple[Place, Difference] | None = None
    _values: dict[Place, Any] = field(default_factory=dict)
    _partners: Mapping[Place, Place] = field(default_factory=dict)

    def watch_before(self, run: Callable[[], object]) -> None:
        """Call `run`, which runs the older version, and keep the value of every node."""
        self._partners = dict(_match(self.before, self.after, by_name=not self.retraced))
        _watch(self.before, self._keep, run)

    def watch_after(self, run: Callable[[], object]) -> None:
        """Call `run`, which runs the newer version, and compare."""
        _watch(self.after, self._compare, run)

    def describe(self) -> NodeFinding | None:
        """Return the first node that is off.

        None where all nodes that both versions have agree, and so do the outputs.
        """
        after = {(graph.kind, node.name): node for graph in self.after for node in graph.gm.graph.nodes}
        before = {(graph.kind, node.name): node for graph in self.before for node in graph.gm.graph.nodes}
        if self.found is None:
            return self._other_output()
        place, found = self.found
        node, partner = after[place], before[self._partners[place]]
        arguments = (_arguments(partner), _arguments(node))
        return NodeFinding(
            graph=place[0],
            node=node.name,
            op=op_name(node),
            where=where(node)[0],
            code=where(node)[1],
            difference=found,
            arguments=None if self.retraced or arguments[0] == arguments[1] else arguments,
            made=tuple(self._made(place[0], node)),
        )

    def _other_output(self) -> NodeFinding | None:
        """Return the first output that is a node of the pass's own making."""
        for graph in self.after:
            output = next(iter(graph.gm.graph.find_nodes(op="output")))
            made = [node for node in output.all_input_nodes if (graph.kind, node.name) not in self._partners]
            if made:
                feeding = tuple(self._made(graph.kind, output))
                place, code = where(made[0])
                nothing = Difference(None, 0.0, "the graph hands out another node than before")
                return NodeFinding(graph.kind, "output", "output", place, code, nothing, made=feeding)
        return None

    def _keep(self, place: Place, value: Any) -> None:
        if isinstance(value, Tensor):
            self._values[place] = value.detach().clone()

    def _compare(self, place: Place, value: Any) -> None:
        partner = self._partners.get(place)
        if self.found is not None or partner not in self._values or not isinstance(value, Tensor):
            return
        assert partner is not None
        apart = difference(self._values[partner], value.detach(), self.tolerance)
        if apart.is_off:
            self.found = (place, apart)

    def _made(self, kind: str, node: Node) -> Iterator[dict[str, str]]:
        seen: set[Node] = set()
        waiting = list(node.all_input_nodes)
        while waiting and len(seen) < _MADE_AT_MOST:
            node = waiting.pop(0)
            if node not in seen and (kind, node.name) not in self._partners:
                seen.add(node)
                waiting.extend(node.all_input_nodes)
                yield {"node": node.name, "op": op_name(node), "where": where(node)[0], "arguments": _arguments(node)}


def _watch(graphs: list[WatchedGraph], look: Callable[[Place, Any], None], run: Callable[[], object]) -> None:
    for graph in graphs:
        graph.look = look
    try:
        run()
    finally:
        for graph in graphs:
            graph.look = None


def _match(before: list[WatchedGraph], after: list[WatchedGraph], *, by_name: bool) -> Iterator[tuple[Place, Place]]:
    """Pair (node of `after`, the same node of `before`)."""
    for graph in after:
        mine = [node for node in graph.gm.graph.nodes if node.op != "output"]
        same = [(other, node) for other in before if other.kind == graph.kind for node in other.gm.graph.nodes]
        if by_name:
            # A pass may move a node from the forward into the backward, where it is computed once more.
            elsewhere = [(other, node) for other in before if other.kind != graph.kind for node in other.gm.graph.nodes]
            known = {node.name: (other.kind, node) for other, node in [*elsewhere, *same]}
            for node in mine:
                kind, partner = known.get(node.name, ("", None))
                if partner is not None and (
                    op_name(partner) == op_name(node) or "placeholder" in (partner.op, node.op)
                ):
                    yield (graph.kind, node.name), (kind, node.name)
            continue
        theirs = [node for _, node in same if node.op != "output"]
        old, new = ([_signature(node) for node in nodes] for nodes in (theirs, mine))
        for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
            for offset in range(block.size):
                yield (
                    (graph.kind, mine[block.b + offset].name),
                    (graph.kind, theirs[block.a + offset].name),
                )


def _signature(node: Node) -> tuple[str, ...]:
    """Return the properties of a node that stay the same when it is traced again, whatever its name."""
    value = node.meta.get("val")
    shape = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else ""
    numbered = re.match(r"(primals|tangents)_\d+$", node.name)
    return (node.op, op_name(node), shape, where(node)[0], node.name if numbered else "")


def op_name(node: Node) -> str:
    """Return the op of a node as the user would write it: `aten.mm.default`; for an input, "input"."""
    if node.op == "placeholder":
        return "input"
    if isinstance(node.target, (str, OpOverload)):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def where(node: Node) -> tuple[str, str]:
    """Return the user's `file:line` that a node comes from, and the text of that line; empty when unknown."""
    return user_source(node.meta.get("stack_trace"))


def _arguments(node: Node) -> str:
    named = [f"{name}={value}" for name, value in node.kwargs.items()]
    return ", ".join([*map(str, node.args), *named])

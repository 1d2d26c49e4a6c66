"""Equal parts of repeated blocks become one function that the graph calls."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from dsgraph.passes.compat import invoke_subgraph

from .bodies import Body, body_of, same_as
from .segments import find_segments

_LEAST_COMPUTED = 3
"""Ops besides views. Of fewer, text and call take as long as the text alone."""


@dataclass(frozen=True)
class Region:
    """A function of which a graph calls several copies.

    Attributes:
        name: Its name in the graph.
        blocks: The list of modules whose blocks it is a part of.
        nodes: How many nodes it has.
        calls: How often it is called.
    """

    name: str
    blocks: str
    nodes: int
    calls: int

    def __str__(self) -> str:
        return f"{self.name}: {self.nodes} nodes of a block of {self.blocks or 'the model'}, called {self.calls} times"


@dataclass(frozen=True)
class Outlined:
    """What became of a graph's segments.

    Attributes:
        regions: The functions, in the order of their first calls.
        inlined: Why other segments stay as they are, each reason once.
    """

    regions: tuple[Region, ...] = ()
    inlined: tuple[str, ...] = ()


def outline_regions(gm: GraphModule, *, prefix: str, within: Collection[str] | None = None) -> Outlined:
    """Lets a graph call one function where blocks compute the same thing, for Inductor to compile it once.

    before:  a = f(x, w0); b = g(a)          wait = wait_tensor(...)         c = f(b, w1); d = g(c)
    after:   (b,) = region_0(x, w0)          wait = wait_tensor(...)         (d,) = region_0(b, w1)

    Left alone: what stands in a graph once, and the order of all else. Each call stands where its nodes stood, so that
    what passes have decided on collectives holds.

    Args:
        gm: A graph of ATen ops with fake values, behind all passes.
        prefix: What names of functions begin with.
        within: The lists of modules whose blocks count; None for all.
    """
    alike: dict[Hashable, list[Body]] = {}
    segments = find_segments(gm)
    known = sorted({segment.blocks for segment in segments})
    reasons: dict[str, None] = dict.fromkeys(
        f"regions: no block of {name!r} is in this graph; there are those of {', '.join(known) or 'none'}"
        for name in within or ()
        if name not in known
    )
    for segment in segments:
        if within is not None and segment.blocks not in within:
            continue
        body = body_of(segment)
        if isinstance(body, str):
            reasons.setdefault(f"a part of a block of {segment.blocks} stays in the graph: {body}")
        elif body.computes >= _LEAST_COMPUTED:
            alike.setdefault(body.key(), []).append(body)
    repeated = {f"{prefix}_{n}": bodies for n, bodies in enumerate(b for b in alike.values() if len(b) > 1)}
    for name, bodies in repeated.items():
        gm.add_module(name, _function(bodies[0]))
    results = dict[Node, Node]()
    for name, bodies in repeated.items():
        with gm.graph.inserting_before(bodies[0].segment.nodes[0]):
            callee = gm.graph.get_attr(name)
        for body in bodies:
            _call(gm, callee, body, results)
    regions = [
        Region(name, bodies[0].segment.blocks, len(bodies[0].nodes), len(bodies)) for name, bodies in repeated.items()
    ]
    alone = sum(len(bodies) == 1 for bodies in alike.values())
    if alone:
        reasons[f"{alone} parts of blocks are like no other"] = None
    if regions:
        gm.graph.eliminate_dead_code()  # views that regions now make for themselves
        gm.graph.lint()
        gm.recompile()
    return Outlined(tuple(regions), tuple(reasons))


def _function(body: Body) -> GraphModule:
    graph, copies = Graph(), dict[Node, Node]()
    for source in body.inputs:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta["val"] = source.meta["val"]
    for node in body.nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[same_as(source)])
    output = graph.output(tuple(copies[node] for node in body.outputs))
    # Callers count on the strides that fake values have.
    output.meta["user_visible_output_idxs"] = list(range(len(body.outputs)))
    return GraphModule({}, graph)


def _call(gm: GraphModule, callee: Node, body: Body, results: dict[Node, Node]) -> None:
    """Puts a call in the place of a segment. `results` says, of all segments, what stands for a node by now."""
    first = body.segment.nodes[0]
    with gm.graph.inserting_before(first):
        inputs = [results.get(node, node) for node in body.inputs]
        call = gm.graph.call_function(invoke_subgraph, (callee, str(callee.target), *inputs))
        call.meta["val"] = tuple(node.meta["val"] for node in body.outputs)
        for number, node in enumerate(body.outputs):
            results[node] = gm.graph.call_function(operator.getitem, (call, number))
            results[node].meta = dict(node.meta)
            node.replace_all_uses_with(results[node])
    for node in reversed(body.segment.nodes):
        if not node.users:
            gm.graph.erase_node(node)

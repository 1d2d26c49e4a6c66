"""The graph of a pipeline stage, cut at its repeated blocks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from dsgraph.passes.ir.blocks import block_of, module_of

from .crossing_bytes import crossing_bytes
from .stage_graphs import StageGraph, StageGraphModule


@dataclass(frozen=True)
class Segment:
    """A part of a stage's graph: a repeated block, or what is between blocks.

    Attributes:
        block: The path of the block; empty for what is between blocks.
        module: The graph: takes the read values, then the parameters and buffers; returns a tuple of the given values.
        reads: Names of the values that it reads, which are those of the nodes of the stage's graph.
        gives: Names of the values that it computes for later segments, or for the stage's result.
        state: Names of the parameters and buffers that it reads.
        likeness: Equal for segments that compute the same from values and parameters of equal shapes.
    """

    block: str
    module: StageGraphModule
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    state: tuple[str, ...]
    likeness: str

    @property
    def hidden(self) -> str:
        """The name of the one read value of the shape and dtype of the one given value; empty if there is none."""
        results: Any = self.module.graph.output_node().args[0]
        if len(results) != 1:
            return ""
        (found,) = results
        inputs = self.module.graph.find_nodes(op="placeholder")[: len(self.reads)]
        alike = [name for name, node in zip(self.reads, inputs, strict=True) if _size(node) == _size(found)]
        return alike[0] if len(alike) == 1 else ""

    @property
    def is_trained(self) -> bool:
        """True if a value that it gives has a gradient."""
        results: Any = self.module.graph.output_node().args[0]
        return any(node.meta["val"].requires_grad for node in results if _size(node))


def segments_of(stage: StageGraph, blocks: Collection[str]) -> list[Segment]:
    """Cut the graph of a stage where repeated blocks begin and end.

    before:  a = embed(x);  b = blocks_0(a);  c = blocks_1(b);  return head(c)
    after:   [a]  [b: "blocks.0"]  [c: "blocks.1"]  [head(c)]

    Where a cut is not possible (in a region of another mode, before a write in place, at a value that is no tensor),
    both parts are one segment, which is no block.

    Args:
        stage: The stage; `meta["val"]` of each node of its graph holds its fake value.
        blocks: The paths of the blocks.
    """
    gm = stage.module
    order = [node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    crossing = crossing_bytes(order, ())
    spans: list[tuple[str, list[Node]]] = []
    tags = _tags(order, stage, blocks)
    for place, (node, tag) in enumerate(zip(order, tags, strict=True)):
        if spans and (spans[-1][0] == tag or not math.isfinite(crossing[place])):
            spans[-1] = (tag if spans[-1][0] == tag else "", [*spans[-1][1], node])
        else:
            spans.append((tag, [node]))
    return [_segment(gm, tag if len(nodes) == tags.count(tag) else "", nodes) for tag, nodes in spans]


def blocks_in(stage: StageGraph, blocks: Collection[str]) -> set[str]:
    """Return the paths of the blocks of which a stage computes something."""
    order = [node for node in stage.module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    return set(_tags(order, stage, blocks)) - {""}


def _tags(order: Sequence[Node], stage: StageGraph, blocks: Collection[str]) -> list[str]:
    """Return the path of the block of each node; empty for a node between blocks.

    A mask or a position that a block computes from the inputs may be in stages that do not have the block.
    """
    found: list[str] = []
    for node in order:
        path = module_of(node)
        block = ".".join(block_of(path) or ()) if path else found[-1] if found else ""
        found.append(block if block in blocks else "")
    tags: list[str] = []
    for tag, group in groupby(zip(order, found, strict=True), key=lambda pair: pair[1]):
        nodes = [node for node, _ in group]
        tags += ["" if all(node.name in stage.repeated for node in nodes) else tag] * len(nodes)
    return tags


def _segment(gm: GraphModule, block: str, nodes: Sequence[Node]) -> Segment:
    graph, root, own = Graph(), nn.Module(), set(nodes)
    outer = dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in own)
    tensors = {read: str(read.target) for read in outer if read.op == "get_attr" and _is_tensor(gm, read)}
    reads = [read for read in outer if read.op != "get_attr"]
    copies = {read: graph.placeholder(read.name) for read in (*reads, *tensors)}
    for read, copy in copies.items():
        copy.meta.update(read.meta)
    for read in outer:
        if read not in copies:  # the body of a region
            setattr(root, str(read.target), getattr(gm, str(read.target)))
            copies[read] = graph.get_attr(str(read.target))
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda read: copies[read])
    gives = [node for node in nodes if any(user not in own for user in node.users)]
    graph.output(tuple(copies[node] for node in gives))
    graph.lint()
    module, state = StageGraphModule(root, graph), tuple(tensors.values())
    return Segment(
        block,
        module,
        tuple(read.name for read in reads),
        tuple(node.name for node in gives),
        state,
        "\n".join(_lines(module)),
    )


def _is_tensor(gm: GraphModule, read: Node) -> bool:
    path, _, leaf = str(read.target).rpartition(".")
    return isinstance(getattr(gm.get_submodule(path), leaf), Tensor)


def _lines(module: GraphModule) -> Iterator[str]:
    """Yield a line for each node, in which nodes are numbers."""
    numbers: Mapping[Node, int] = {node: at for at, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        args, kwargs = (_numbered(each, numbers) for each in (node.args, node.kwargs))
        # The body of a region belongs to one place.
        target = id(getattr(module, str(node.target))) if node.op == "get_attr" else node.target
        yield f"{node.op} {'' if node.op == 'placeholder' else target} {args} {kwargs} {_kind(node)}"


def _numbered(value: object, numbers: Mapping[Node, int]) -> str:
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_numbered(item, numbers) for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_numbered(item, numbers)}' for key, item in value.items())}}}"
    return repr(value)


def _kind(node: Node) -> str:
    return f"{_size(node)} {getattr(node.meta.get('val'), 'requires_grad', None)}"


def _size(node: Node) -> str:
    value = node.meta.get("val")
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else ""

"""Planning on graphs that are only read, never run."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from dsgraph.passes.compat import (
    OpOverload,
    compiled_when_run,
    is_compiled_when_run,
    make_graph_module,
    min_cut_rematerialization_partition,
    storage_id,
    without_merging,
)
from dsgraph.passes.ir.graph import has_storage, mutates_arguments

_VARYING = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@contextmanager
def on_scratch() -> Iterator[None]:
    """Speed up planning by a factor of three: for a deep model, many graphs are made and dropped.

    Graphs that are made in the block become Python code when they are run, see `runnable`; usually they never are. The
    garbage collector, which would visit millions of nodes again and again, is paused: it finds the dropped graphs at
    its next full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with compiled_when_run():
            yield
    finally:
        if not gc.get_freeze_count():  # what somebody has frozen would thaw as well
            gc.freeze()
            gc.unfreeze()  # to the oldest generation
        if was_enabled:
            gc.enable()


def copy_graph(gm: GraphModule) -> GraphModule:
    """Return a copy of the nodes, for a caller that changes them."""
    graph = Graph()
    copied: Any = graph.graph_copy(gm.graph, {}, return_output_node=True)
    result, old = copied
    output = graph.output(result, old.type)
    output.meta = dict(old.meta)
    return make_graph_module(gm, graph)


def without_duplicates(gm: GraphModule) -> GraphModule:
    """Return a copy of a joint graph without duplicate nodes.

    Torch's partitioners merge duplicates as well, and keep the choice for the first of two equal nodes.
    """
    found = make_graph_module(gm, merge_equal_nodes(gm.graph))
    found.graph.eliminate_dead_code()
    return found


def merge_equal_nodes(graph: Graph) -> Graph:
    """Return a copy of a graph with equal calls merged, as torch's partitioner does, but without importing Inductor.

    Not merged: calls with a write to memory between them, whose numbers differ each time or whose sizes depend on data,
    and those whose memory the graph returns.
    """
    merged, copies, known, writes = Graph(), dict[Node, Node](), dict[object, Node](), 0
    (output,) = graph.find_nodes(op="output")
    returned = {storage_id(node.meta["val"]) for node in output.all_input_nodes if has_storage(node.meta.get("val"))}
    for node in graph.nodes:
        writes += mutates_arguments(node)
        key: object = node
        value = node.meta.get("val")
        if _is_repeatable(node) and not (has_storage(value) and storage_id(value) in returned):
            key = writes, node.target, repr(map_arg((node.args, node.kwargs), copies.__getitem__))
        if key not in known:
            known[key] = merged.node_copy(node, copies.__getitem__)
        copies[node] = known[key]
    return merged


def split_by_min_cut(gm: GraphModule, inputs: Sequence[object], **how: Any) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph, which is consumed, by torch's min-cut partitioner, with equal nodes merged by us."""
    gm.graph = merge_equal_nodes(gm.graph)
    with without_merging():
        return min_cut_rematerialization_partition(gm, inputs, **how)


def _is_repeatable(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    return node.target.overloadpacket is not torch.ops.aten.empty and _VARYING.isdisjoint(node.target.tags)


def runnable(gm: GraphModule) -> GraphModule:
    """Return the module of a graph that was made `on_scratch`, as if it had been made elsewhere."""
    return GraphModule(gm, gm.graph) if is_compiled_when_run(gm) else gm

"""Planning on graphs that are only read, never run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx import Graph, GraphModule

from dsgraph.passes.compat import compiled_when_run, is_compiled_when_run, make_graph_module, merge_equal_nodes


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


def runnable(gm: GraphModule) -> GraphModule:
    """Return the module of a graph that was made `on_scratch`, as if it had been made elsewhere."""
    return GraphModule(gm, gm.graph) if is_compiled_when_run(gm) else gm

"""Planning on graphs that are looked at and never run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx import Graph, GraphModule

from dsgraph.passes.compat import compiled_when_run, is_compiled_when_run, make_graph_module, merge_equal_nodes


@contextmanager
def on_scratch() -> Iterator[None]:
    """What is planned within takes a third of the time: of a deep model, many graphs are made and thrown away.

    Graphs that are made within become Python code when they are run, see `runnable`; as a rule they never are. And the
    garbage collector, which would go through millions of nodes time and again, rests: it finds what was thrown away
    when it next looks at everything.
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
    """The same nodes once more, for whoever changes what he is given."""
    graph = Graph()
    copied: Any = graph.graph_copy(gm.graph, {}, return_output_node=True)
    result, old = copied
    output = graph.output(result, old.type)
    output.meta = dict(old.meta)
    return make_graph_module(gm, graph)


def without_duplicates(gm: GraphModule) -> GraphModule:
    """A copy of a joint graph in which everything is computed once.

    Torch's partitioners compute it once as well. Of two equal nodes they keep what was chosen for the first.
    """
    found = copy_graph(gm)
    found.graph.eliminate_dead_code()
    found.graph = merge_equal_nodes(found.graph)
    return found


def runnable(gm: GraphModule) -> GraphModule:
    """The module of a graph that was made `on_scratch`, as it would be had it been made elsewhere."""
    return GraphModule(gm, gm.graph) if is_compiled_when_run(gm) else gm

"""The backend of an engine that counts the operations of its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from dsgraph.compat.compiled import backend_named
from dsgraph.compiler.module_flops import ModuleFlops, module_flops
from dsgraph.utils.errors import on_one_line


@dataclass
class CountedGraph:
    """A captured graph.

    Attributes:
        flops: Of one run, forward and backward.
        runs: Number of runs.
    """

    flops: ModuleFlops
    runs: int = 0


@dataclass(eq=False)
class CountedGraphs:
    """The backend "dsgraph" with a count of the operations of one engine's graphs.

    Attributes:
        graphs: The captured graphs, in order.
        unknown: Why a graph could not be counted; empty if all were.
    """

    graphs: list[CountedGraph] = field(default_factory=list)
    unknown: str = ""
    __name__ = "dsgraph"

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Count a graph's operations, and have it compiled."""
        graph = self._counted(gm, inputs)
        compiled = backend_named("dsgraph")(gm, inputs, **options)
        if graph is None:
            return compiled

        def run(*args: Any) -> Any:
            graph.runs += 1
            return compiled(*args)

        return run

    def _counted(self, gm: GraphModule, inputs: Sequence[Any]) -> CountedGraph | None:
        try:
            graph = CountedGraph(module_flops(gm, inputs))
        except Exception as error:  # a failed count must not end training: the error is shown with the profile
            self.unknown = on_one_line(error)[:200]
            return None
        self.graphs.append(graph)
        return graph

    def __deepcopy__(self, memo: dict[int, Any]) -> CountedGraphs:
        """Return the backend itself: a copy of a compiled model is compiled by the same backend."""
        return self

    def total(self) -> int | None:
        """Return the operations of all runs so far; None if a graph could not be counted."""
        return None if self.unknown else sum(graph.runs * graph.flops.total for graph in self.graphs)

    def runs(self) -> list[int]:
        """Return the number of runs of each graph."""
        return [graph.runs for graph in self.graphs]

    def since(self, runs: Sequence[int]) -> ModuleFlops:
        """Return the operations of the runs since an earlier result of `runs`."""
        found = ModuleFlops()
        before = [*runs, *[0] * (len(self.graphs) - len(runs))]
        for graph, earlier in zip(self.graphs, before, strict=True):
            for mine, theirs in ((found.forward, graph.flops.forward), (found.backward, graph.flops.backward)):
                for modules, operations in theirs.items():
                    mine[modules] += operations * (graph.runs - earlier)
        return found

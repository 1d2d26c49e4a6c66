"""The backend of an engine that counts what its graphs compute."""

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
        runs: How often it has run.
    """

    flops: ModuleFlops
    runs: int = 0


@dataclass(eq=False)
class CountedGraphs:
    """The backend "dsgraph", with an account of the graphs that one engine runs.

    Attributes:
        graphs: Those that were captured, in this order.
        unknown: Why some graph could not be counted; empty where all were.
    """

    graphs: list[CountedGraph] = field(default_factory=list)
    unknown: str = ""
    __name__ = "dsgraph"

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Counts a graph, and has it compiled."""
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
        except Exception as error:  # it is a count: training goes on without it, and whoever asks is told
            self.unknown = on_one_line(error)[:200]
            return None
        self.graphs.append(graph)
        return graph

    def __deepcopy__(self, memo: dict[int, Any]) -> CountedGraphs:
        """Itself: a copy of a compiled model is compiled by the same backend."""
        return self

    def total(self) -> int | None:
        """Operations of all runs so far; None where some graph could not be counted."""
        return None if self.unknown else sum(graph.runs * graph.flops.total for graph in self.graphs)

    def runs(self) -> list[int]:
        """How often each graph has run."""
        return [graph.runs for graph in self.graphs]

    def since(self, runs: Sequence[int]) -> ModuleFlops:
        """Operations of the runs since `runs` were all."""
        found = ModuleFlops()
        before = [*runs, *[0] * (len(self.graphs) - len(runs))]
        for graph, earlier in zip(self.graphs, before, strict=True):
            for mine, theirs in ((found.forward, graph.flops.forward), (found.backward, graph.flops.backward)):
                for modules, operations in theirs.items():
                    mine[modules] += operations * (graph.runs - earlier)
        return found

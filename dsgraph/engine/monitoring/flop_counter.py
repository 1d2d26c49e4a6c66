"""The backend of an engine that counts the operations of its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from dsgraph.compat.compiled import backend_named
from dsgraph.compiler.module_flops import graph_flops


@dataclass(eq=False)
class CountedGraphs:
    """The backend "dsgraph" with a count of the operations of one engine's graphs.

    Attributes:
        total: The operations of all runs so far, forward and backward; None if a graph could not be counted.
    """

    total: int | None = 0
    __name__ = "dsgraph"

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Count a graph's operations, and have it compiled."""
        try:
            operations = graph_flops(gm, inputs)
        except Exception:  # a failed count must not end training
            self.total = None
            operations = 0
        compiled = backend_named("dsgraph")(gm, inputs, **options)

        def run(*args: Any) -> Any:
            if self.total is not None:
                self.total += operations
            return compiled(*args)

        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> CountedGraphs:
        """Return the backend itself: a copy of a compiled model is compiled by the same backend."""
        return self

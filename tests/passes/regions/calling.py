"""Runs graphs that call regions."""

from __future__ import annotations

from typing import Any

from torch.fx import Interpreter

from dsgraph.passes.compat import invoke_subgraph


class Calling(Interpreter):
    """Runs a graph; a call of a region is a call of its body, whatever it is given."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is invoke_subgraph:
            return Calling(args[0]).run(*args[2:])
        return super().call_function(target, args, kwargs)

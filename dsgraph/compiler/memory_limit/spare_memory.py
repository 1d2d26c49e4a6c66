"""The memory that a training step leaves on a device, from a captured graph and the sizes of its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from dsgraph.compiler.fake_run import on_fakes
from dsgraph.partitioning.state import partition_states
from dsgraph.passes import CaptureFacts
from dsgraph.passes.analysis.budget import MemoryPart
from dsgraph.passes.compat import storage_id
from dsgraph.passes.ir.graph import all_graph_modules, is_gather_marker
from dsgraph.passes.overlap.buckets import least_bytes

# In addition to the saved values, a backward holds one or two gradients of that size.
_GRADIENTS_ALIVE = 2
# The parameter that is computed with, the next, and a gradient; or a bucket of each.
_PARAMETERS_ALIVE = 3


def spare_bytes(gm: GraphModule, inputs: Sequence[Any], *, facts: CaptureFacts, module: nn.Module | None) -> int | None:
    """Return the memory that the limit leaves besides a training step, if no gathered parameter is kept.

    The graph is run on fake tensors, and the bytes that plain autograd would save are added up. A compiled graph saves
    less, so this is a safe estimate. It does not know what a checkpoint region recomputes, nor other graphs of the
    model. The estimate is optional: if the graph cannot run on fake tensors, there is none.

    Args:
        gm: The captured graph.
        inputs: Its inputs.
        facts: The facts of the graph.
        module: The module whose forward it is.

    Returns:
        Bytes, 0 or more. None if nothing can be kept (no gathers in the graph, no gradients), and if nothing is known:
            without a limit, for a part of a model, for a graph that cannot run on fake tensors, as with data-dependent
            sizes.
    """
    if facts.memory_limit is None or not torch.is_grad_enabled() or not _gathers(gm):
        return None
    if not is_whole_model(facts, module):
        return None
    saved = _saved_by_autograd(gm, inputs)
    if saved is None:
        return None
    sizes = [math.prod(info.shape) * info.dtype.itemsize for info in facts.params.values()]
    bucket = min(sum(sizes), max(map(least_bytes, facts.axes), default=0))
    budget = facts.budget()
    needs = {
        **budget.needs,
        MemoryPart.GATHERED_COPIES: sum(inputs[number].untyped_storage().nbytes() for number in facts.gathered_copies),
        MemoryPart.ACTIVATIONS: saved.total + _GRADIENTS_ALIVE * saved.largest,
        MemoryPart.COMMUNICATION: _PARAMETERS_ALIVE * max(*sizes, bucket),
    }
    return replace(budget, needs=needs).left


def _gathers(gm: GraphModule) -> bool:
    """Return whether the graph fetches parameters, instead of reading gathered copies or replicated ones."""
    markers = (node for module in all_graph_modules(gm) for node in module.graph.nodes if is_gather_marker(node))
    return any(marker.args[1] is None and marker.kwargs["group"] for marker in markers)


def is_whole_model(facts: CaptureFacts, module: nn.Module | None) -> bool:
    """Return whether the graph reads every parameter of the model: then no other graph needs memory."""
    entries = [entry for state in partition_states(module) for entry in state.parameters] if module is not None else []
    return bool(entries) and len(entries) == len(facts.params)


@dataclass
class _Saved:
    """Tensors that autograd saves, each storage once, without gathered parameters and inputs."""

    known: dict[int, object] = field(default_factory=dict)  # storage -> what keeps it alive, lest its id is used again
    total: int = 0
    largest: int = 0

    def leave_out(self, value: object) -> None:
        """Leave the storage of a value out of the count."""
        if isinstance(value, Tensor):
            self.known[storage_id(value)] = value

    def add(self, value: Tensor) -> Tensor:
        """Count a tensor unless it was counted before."""
        if storage_id(value) not in self.known:
            self.known[storage_id(value)] = value
            size = value.untyped_storage().nbytes()
            self.total += size
            self.largest = max(self.largest, size)
        return value


class _Watching(Interpreter):
    """Runs a graph and leaves gathered parameters, and views of inputs, out of the count."""

    def __init__(self, gm: GraphModule, saved: _Saved) -> None:
        super().__init__(gm)
        self._saved = saved

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        if node.op == "placeholder" or is_gather_marker(node) or node.target == "to_local":
            self._saved.leave_out(value)
        return value


def _saved_by_autograd(gm: GraphModule, inputs: Sequence[Any]) -> _Saved | None:
    saved = _Saved()
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.add, lambda value: value)
    try:
        with on_fakes(inputs) as fakes, torch.enable_grad(), hooks:
            _Watching(gm, saved).run(*fakes)
    except Exception:
        return None
    return saved

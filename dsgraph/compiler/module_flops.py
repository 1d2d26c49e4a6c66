"""The floating-point operations of a captured graph, module by module.

The graph is run on fake tensors, forward and backward, by the formulas of `torch.utils.flop_counter`. It contains the
model as its author wrote it: no pass has seen it yet, so that recomputation in the backward is not counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from dsgraph.partitioning.blocks.live_bytes import tensors
from dsgraph.passes.analysis.cost import flop_formula
from dsgraph.passes.compat import (
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    autograd_count,
    running_autograd_node,
)

from .fake_run import on_fakes

Modules = tuple[int, ...]
"""The modules that were being called, outermost first, by their `id`."""


@dataclass
class ModuleFlops:
    """Floating-point operations of one run of a graph, a multiplication and an addition counted as two.

    Attributes:
        forward: Those of the forward, by the modules that were being called.
        backward: Those of the backward, by the modules whose forward it belongs to; empty without gradients.
    """

    forward: dict[Modules, int] = field(default_factory=lambda: defaultdict(int))
    backward: dict[Modules, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def total(self) -> int:
        """Operations of forward and backward."""
        return sum(self.forward.values()) + sum(self.backward.values())


def module_flops(gm: GraphModule, inputs: Sequence[Any]) -> ModuleFlops:
    """Count the operations of a captured graph.

    The backward is that of the scalars among its outputs, or of all outputs where there are none.

    Args:
        gm: The graph from Dynamo, whose nodes say which modules were being called. It is not changed.
        inputs: Its inputs.

    Raises:
        Exception: The graph cannot run on fake tensors, as with data-dependent sizes.
    """
    counting = _Counting()
    with on_fakes(inputs) as fakes, counting:
        outputs = _Running(gm, counting).run(*fakes)
        wanted = [out for out in tensors(outputs) if out.requires_grad]
        wanted = [out for out in wanted if out.dim() == 0] or wanted
        leaves = [value for value in fakes if isinstance(value, Tensor) and value.requires_grad]
        if wanted and leaves:
            seeds = [torch.ones_like(out) for out in wanted]
            torch.autograd.grad(wanted, leaves, seeds, allow_unused=True)
    return counting.found


class _Counting(TorchDispatchMode):
    """Counts each op that runs, for the node of the graph that runs it, or whose derivative it is."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ModuleFlops()
        self._modules: Modules = ()
        self._begins: list[int] = []  # autograd nodes from here on belong to ...
        self._owners: list[Modules] = []  # ... these modules

    @contextmanager
    def of(self, modules: Modules) -> Iterator[None]:
        """Assign the ops that run inside the block to these modules."""
        before, self._modules = self._modules, modules
        self._note(modules)
        try:
            yield
        finally:
            self._modules = before
            self._note(before)

    def _note(self, modules: Modules) -> None:
        self._begins.append(autograd_count())
        self._owners.append(modules)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_formula(func)
        if formula is None and isinstance(func, OpOverload) and func.namespace == "aten":
            with self:  # as `FlopCounterMode` does: an op may be made of others that have a formula
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            self._add(int(formula(*args, **kwargs, out_val=result)))
        return result

    def _add(self, operations: int) -> None:
        derivative_of = running_autograd_node()
        if derivative_of is None:
            self.found.forward[self._modules] += operations
        else:
            owner = self._owners[bisect_right(self._begins, derivative_of) - 1]
            self.found.backward[owner] += operations


class _Running(Interpreter):
    """Runs a graph node by node. Checkpoint regions run once, as if they were not there."""

    def __init__(self, gm: GraphModule, counting: _Counting) -> None:
        super().__init__(gm)
        self._counting = counting

    def run_node(self, node: Node) -> Any:
        with self._counting.of(_modules_of(node)):
            if isinstance(node.target, HigherOrderOperator):
                args, _ = self.fetch_args_kwargs_from_env(node)
                if args and isinstance(args[0], GraphModule):
                    return _Running(args[0], self._counting).run(*args[1:])
            return super().run_node(node)


def _modules_of(node: Node) -> Modules:
    """Return the modules of a node. Dynamo names them by their `id`, and adds a number if one is called again."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(int(number) for key in stack if (number := str(key).partition("@")[0]).isdigit())

"""The floating-point operations of a model, module by module, and of a captured graph.

They run on fake tensors, forward and backward, by the formulas of `torch.utils.flop_counter`. Both are as the model's
author wrote them: no pass has seen a graph, and what a checkpoint recomputes in the backward is not counted.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from dsgraph.compat.tensors import map_tensors, without_fake_errors
from dsgraph.partitioning.blocks.fake_step import fake_copy, losses_of
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.passes.analysis.cost import flop_formula
from dsgraph.passes.compat import (
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    autograd_count,
    running_autograd_node,
)

from .fake_run import on_fakes


@dataclass
class ModuleFlops:
    """Floating-point operations of a forward and its backward, a multiplication and an addition counted as two.

    Attributes:
        forward: Those of the forward, by the name of the innermost module that is called; empty for the model.
        backward: Those of the backward, by the module whose forward it belongs to; empty without gradients.
    """

    forward: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    backward: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def total(self) -> int:
        """Operations of forward and backward."""
        return sum(self.forward.values()) + sum(self.backward.values())


@torch.compiler.disable
def model_flops(
    model: nn.Module, parameters: Sequence[ParameterState], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ModuleFlops:
    """Count the operations of a forward and backward of a partitioned model, however it is compiled.

    Args:
        model: The model. A copy of it runs, without values.
        parameters: Its parameters.
        args: The arguments of its forward.
        kwargs: Those given by name.

    Raises:
        Exception: The model cannot run on fake tensors, as with branches that depend on values.
    """
    counting, state = _Counting(), random.getstate()
    fakes, made, _ = fake_copy(model, parameters, {entry: entry.spec.full_shape for entry in parameters})
    for name, module in made.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: counting.enter(name))
        module.register_forward_hook(lambda *_: counting.leave(), always_call=True)
    args, kwargs = map_tensors(fakes.from_tensor, (args, kwargs))
    try:
        with without_fake_errors(), fakes, counting:
            losses = losses_of(made(*args, **kwargs))
            torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    finally:
        random.setstate(state)
    return counting.found


def graph_flops(gm: GraphModule, inputs: Sequence[Any]) -> int:
    """Count the operations of a captured graph and of its backward.

    The backward is that of the scalars among its outputs, or of all outputs where there are none.

    Args:
        gm: The graph from Dynamo. It is not changed.
        inputs: Its inputs.

    Raises:
        Exception: The graph cannot run on fake tensors, as with data-dependent sizes.
    """
    counting = _Counting()
    with on_fakes(inputs) as fakes, counting:
        wanted = losses_of(_Running(gm).run(*fakes))
        leaves = [value for value in fakes if isinstance(value, Tensor) and value.requires_grad]
        if wanted and leaves:
            seeds = [torch.ones_like(out) for out in wanted]
            torch.autograd.grad(wanted, leaves, seeds, allow_unused=True)
    return counting.found.total


class _Counting(TorchDispatchMode):
    """Counts each op that runs, for the module that runs it, or whose derivative it is."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ModuleFlops()
        self._called = [""]
        self._begins: list[int] = []  # autograd nodes from here on belong to ...
        self._owners: list[str] = []  # ... these modules

    def enter(self, module: str) -> None:
        """Note that a module is called."""
        self._called.append(module)
        self._note()

    def leave(self) -> None:
        """Note that the module has returned."""
        self._called.pop()
        self._note()

    def _note(self) -> None:
        made = autograd_count()
        if not self._begins or made >= self._begins[-1]:  # a thread of a backward counts from 0
            self._begins.append(made)
            self._owners.append(self._called[-1])

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
            self.found.forward[self._called[-1]] += operations
        elif not torch.is_grad_enabled():  # a checkpoint recomputes with gradients
            owner = bisect_right(self._begins, derivative_of) - 1
            self.found.backward[self._owners[owner] if owner >= 0 else ""] += operations


class _Running(Interpreter):
    """Runs a graph. Checkpoint regions run once, as if they were not there."""

    def run_node(self, node: Node) -> Any:
        if isinstance(node.target, HigherOrderOperator):
            args, _ = self.fetch_args_kwargs_from_env(node)
            if args and isinstance(args[0], GraphModule):
                return _Running(args[0]).run(*args[1:])
        return super().run_node(node)

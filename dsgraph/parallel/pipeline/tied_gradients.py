"""Gradients of a pipeline at the end of a step: tied parameters, data-parallel copies, the norm."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh

from dsgraph.compat.tensors import without_overrides
from dsgraph.optim.gradient_norm import GradientPart, LocalGradients
from dsgraph.partitioning.rows import own_part, split_dims
from dsgraph.passes.ir.parameters import ParameterSlice
from dsgraph.passes.parallel.stages.stage_graphs import StageGraph
from dsgraph.ranks.mesh import axis_group
from dsgraph.utils.errors import GradientError

from .captured_model import CapturedModel
from .sharded_stages import Copies, ShardedStages
from .stage_modules import StageModule

_OF_ALL, _OF_MATRICES = ("torch.optim.lbfgs",), ("torch.optim._adafactor", "torch.optim._muon")
_NO_NORM = (
    "a norm of these gradients would be that of one rank's stages and slices: call clip_grad_norm_(max_norm) of what "
    "pipeline or parallelize returned, which clips by the norm over all ranks"
)


class StageGradient(Tensor):
    """A gradient of a stage, with which functions of torch that need those of all ranks raise an error.

    Attributes:
        is_slice: True if other tensor-parallel ranks hold the rest of it.
    """

    is_slice = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on plain tensors.

        Raises:
            GradientError: A caller in torch would compute with the gradients of other ranks as well.
        """
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller == "torch.nn.utils.clip_grad" and "norm" in func.__name__:
            raise GradientError(_NO_NORM)
        if caller in _OF_ALL or (caller in _OF_MATRICES and args and getattr(args[0], "is_slice", False)):
            raise GradientError(f"{caller} computes with full gradients, and this rank has a part of them: use AdamW")
        return without_overrides(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


@dataclass
class StepGradients:
    """The gradients of one rank's stages.

    Attributes:
        parameters: This rank's, by name.
        tied: Parameters that stages of several ranks read, by name, fake: shapes and dtypes, on all ranks in the same
            order.
        owned: Those tied parameters whose gradient this rank counts in a norm.
        pipeline: The ranks of the pipeline.
        copies: The ranks that hold the same stages; None without data parallelism.
        sharded: The parameters as shards over those ranks; None without data parallelism.
        slices: The parameters of which this rank holds a slice.
    """

    parameters: Mapping[str, nn.Parameter]
    tied: Mapping[str, Tensor]
    owned: frozenset[str]
    pipeline: dist.ProcessGroup
    copies: dist.ProcessGroup | None
    sharded: ShardedStages | None
    slices: Mapping[str, ParameterSlice]
    device: torch.device
    _before: dict[str, Tensor | None] = field(default_factory=dict)

    def begin(self) -> None:
        """Set aside the gradients of earlier steps, which are reduced already, and gather sharded parameters."""
        if self.sharded is not None:
            self.sharded.begin()
        self._before = {name: parameter.grad for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None

    def abandon(self) -> None:
        """End a step that failed: restore the gradients from before it, and release full parameters."""
        if self.sharded is not None:
            self.sharded.take_gradients()
            self.sharded.let_go()
        for name, parameter in self.parameters.items():
            parameter.grad = self._before.pop(name)

    def finish(self, loss: Tensor) -> Tensor:
        """Sum tied gradients over their holders, average over data-parallel ranks, and add what was set aside.

        Args:
            loss: This rank's part of the loss; 0 unless it holds the last stage.

        Returns:
            The loss.
        """
        grads = {name: parameter.grad for name, parameter in self.parameters.items()}
        if self.sharded is not None:
            grads = self.sharded.take_gradients()
        for name, like in self.tied.items():
            summed = torch.zeros(like.shape, dtype=like.dtype, device=self.device)
            if (mine := grads.get(name)) is not None:
                summed += mine
            dist.all_reduce(summed, group=self.pipeline)
            if name in grads:
                grads[name] = summed
        self.average(loss)
        if self.sharded is not None:
            self.sharded.finish(grads)
            for name, shard in self.sharded.shards.named_parameters():
                if shard.grad is not None:
                    vars(shard.grad).update(dsgraph_no_norm=_NO_NORM, is_slice=name in self.slices)
            return loss
        for name, parameter in self.parameters.items():
            before, grad = self._before.pop(name), grads[name]
            grad = grad if before is None else before if grad is None else before.add_(grad)
            parameter.grad = None if grad is None else without_overrides(grad.as_subclass, (StageGradient,), {})
            if parameter.grad is not None:
                parameter.grad.is_slice = name in self.slices
        return loss

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Gather sharded parameters for the block, and leave gradients unchanged."""
        if self.sharded is not None:
            self.sharded.begin()
        try:
            yield
        finally:
            if self.sharded is not None:
                self.sharded.let_go()

    def updated(self) -> Iterable[nn.Parameter]:
        """Return the parameters that an optimizer updates: the shards with data parallelism."""
        return self.parameters.values() if self.sharded is None else self.sharded.shards.parameters()

    def tensors(self) -> Iterable[Tensor]:
        """Return this rank's parameters: shards and full ones."""
        return self.parameters.values() if self.sharded is None else self.sharded.tensors()

    def earlier_bytes(self) -> int:
        """Return the bytes of gradients of earlier steps."""
        return sum(own_part(param.grad).nbytes for param in self.updated() if param.grad is not None)

    def accumulated_bytes(self) -> int:
        """Return the bytes of the gradients that a step accumulates."""
        if self.sharded is not None:
            return self.sharded.accumulated_bytes()
        return sum(param.nbytes for param in self.parameters.values() if param.requires_grad)

    def reduction_bytes(self) -> int:
        """Return the bytes that the end of a step takes besides accumulated gradients."""
        tied = sum(like.nbytes for like in self.tied.values())
        return tied + (self.sharded.reduction_bytes() if self.sharded is not None else 0)

    def at_ends(self, step: Mapping[str, int], *, earlier: int) -> dict[str, dict[str, int]]:
        """Return the bytes at the beginning and at the end of a step, by purpose.

        Args:
            step: Bytes during the step, by purpose.
            earlier: Bytes of gradients of earlier steps.
        """
        changed = self.sharded.transform_bytes() if self.sharded is not None else 0
        return {
            "beginning": {**step, "gradients": earlier, "transformed parameters": changed},
            "end": {**step, "reduced gradients": self.reduction_bytes()},
        }

    def average(self, loss: Tensor) -> Tensor:
        """Return the mean loss over data-parallel ranks, in place, from the parts of the pipeline's ranks."""
        dist.all_reduce(loss, group=self.pipeline)
        if self.sharded is not None:
            dist.all_reduce(loss, group=self.copies)
            loss.div_(dist.get_world_size(self.copies))
        return loss

    def sum_over_pipeline(self, value: float) -> float:
        """Return the sum of a number over the ranks of the pipeline."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.pipeline)
        return total.item()

    def local(self, parameters: Mapping[str, nn.Parameter]) -> LocalGradients:
        """Return the gradients as the optimizer sees them.

        Args:
            parameters: The optimizer's parameters, by name: shards with data parallelism.
        """
        stages = self.pipeline.group_name
        copies = self.copies.group_name if self.copies is not None else None
        parts = []
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            split: set[str] = {stages}
            if copies and split_dims(parameter):
                split.add(copies)
            if name in self.slices:
                split.add(self.slices[name].group)
            is_counted = name not in self.tied or name in self.owned
            grad = without_overrides(own_part(parameter.grad).as_subclass, (Tensor,), {})
            parts.append(GradientPart(grad, frozenset(split), is_counted))
        slicing = sorted({held.group for held in self.slices.values()})
        return LocalGradients(parts, (*([copies] if copies else []), *slicing, stages), self.device)


def tied_parameters(graphs: Sequence[StageGraph]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages read, with these stages."""
    readers: dict[str, list[int]] = {}
    for number, graph in enumerate(graphs):
        for name, _ in graph.module.named_parameters():
            readers.setdefault(name, []).append(number)
    return {name: tuple(stages) for name, stages in readers.items() if len(stages) > 1}


def gradients_of_stages(
    captured: CapturedModel,
    mine: Mapping[int, StageModule],
    tied: Mapping[str, tuple[int, ...]],
    *,
    held: Sequence[Sequence[int]],
    mesh: DeviceMesh,
    copies: Copies | None,
    device: torch.device,
) -> StepGradients:
    """Return the gradients of this rank's stages, and shard its parameters.

    Args:
        captured: The captured model.
        mine: This rank's stages.
        tied: See `tied_parameters`.
        held: The stages of each rank.
        mesh: Mesh of the pipeline.
        copies: The ranks that hold the same stages; None without data parallelism.
        device: Device of the stages.
    """
    rank_of = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    apart = {name: stages for name, stages in tied.items() if len({rank_of[stage] for stage in stages}) > 1}
    tensors = dict(captured.state.values())
    parameters = {name: value for stage in mine.values() for name, value in stage.graph_module.named_parameters()}
    like = {name: tensors[name].detach().to("meta") for name in apart if tensors[name].requires_grad}
    sharded = ShardedStages(parameters, copies) if copies is not None else None
    for queue in [stage.queue for stage in mine.values()]:
        if queue is not None and sharded is not None:
            queue.after_gradient = sharded.add_gradient
    return StepGradients(
        parameters,
        like,
        frozenset(name for name, stages in apart.items() if stages[0] in mine),
        axis_group(mesh, 0),
        axis_group(copies.mesh, 0) if copies is not None else None,
        sharded,
        {name: held for name, held in captured.slices.items() if name in parameters},
        device,
    )

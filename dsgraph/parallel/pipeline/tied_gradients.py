"""Gradients of a pipeline at the end of a step: tied parameters, data-parallel copies, the norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from dsgraph.optim.gradient_norm import GradientPart, LocalGradients
from dsgraph.partitioning.rows import own_part
from dsgraph.partitioning.transforms.parameter_slice import ParameterSlice

from .sharded_stages import ShardedStages


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

    def finish(self, loss: Tensor) -> Tensor:
        """Sum tied gradients over their holders, average over data-parallel ranks, and add what was set aside.

        Args:
            loss: This rank's part of the loss; 0 unless it holds the last stage.

        Returns:
            The loss.
        """
        for name, like in self.tied.items():
            mine = self.parameters.get(name)
            summed = torch.zeros(like.shape, dtype=like.dtype, device=self.device)
            if mine is not None and mine.grad is not None:
                summed += mine.grad
            dist.all_reduce(summed, group=self.pipeline)
            if mine is not None:
                mine.grad = summed
        dist.all_reduce(loss, group=self.pipeline)
        if self.sharded is not None:
            dist.all_reduce(loss, group=self.copies)
            loss.div_(dist.get_world_size(self.copies))
            self.sharded.finish()
        for name, parameter in self.parameters.items():
            before = self._before.pop(name)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
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
            if copies and isinstance(parameter, DTensor) and any(map(_is_shard, parameter.placements)):
                split.add(copies)
            if name in self.slices:
                split.add(self.slices[name].group)
            is_counted = name not in self.tied or name in self.owned
            parts.append(GradientPart(own_part(parameter.grad), frozenset(split), is_counted))
        slicing = sorted({held.group for held in self.slices.values()})
        return LocalGradients(parts, (*([copies] if copies else []), *slicing, stages), self.device)


def _is_shard(placement: Placement) -> bool:
    return isinstance(placement, Shard)

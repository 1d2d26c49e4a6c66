"""What is done with a pipeline's gradients once a step: tied parameters, data-parallel copies, the norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from dsgraph.inductor_ext import resolve_group
from dsgraph.partitioning.rows import own_part
from dsgraph.partitioning.transforms.slices import ParameterSlice

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
        """Puts aside what steps before have added up: it is reduced already. Gathers what is sharded."""
        if self.sharded is not None:
            self.sharded.begin()
        self._before = {name: parameter.grad for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None

    def finish(self, loss: Tensor) -> Tensor:
        """Sums tied gradients over their holders, averages over the copies, adds what was put aside.

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
        """The sum of a number over the ranks of the pipeline."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.pipeline)
        return total.item()

    def norm(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """The joint 2-norm of the pipeline's gradients.

        Args:
            parameters: Those that an optimizer steps on, by name: shards with data parallelism.
        """
        squares = torch.zeros(4, device=self.device)
        for name, parameter in parameters.items():
            if parameter.grad is None or (name in self.tied and name not in self.owned):
                continue
            is_split = isinstance(parameter, DTensor) and any(isinstance(part, Shard) for part in parameter.placements)
            squares[2 * (name in self.slices) + is_split] += own_part(parameter.grad).float().pow(2).sum()
        replicated, split, sliced, both = squares.split(1)
        if self.copies is not None:
            dist.all_reduce(both, group=self.copies)
            dist.all_reduce(split, group=self.copies)
        sliced = sliced + both
        for group in {held.group for held in self.slices.values()}:
            dist.all_reduce(sliced, group=resolve_group(group))
        total = (replicated + split + sliced).squeeze()
        dist.all_reduce(total, group=self.pipeline)
        return total.sqrt()

"""The parameters and buffers of one rank's stages, their gradients and their checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dsgraph.checkpoint.model_tensors import ModelTensors, copy_into
from dsgraph.checkpoint.model_training import ModelTraining
from dsgraph.compat.process_groups import group_timeout
from dsgraph.optim.gradient_norm import LocalGradients
from dsgraph.partitioning.rows import full_value
from dsgraph.ranks.agreement import Agreement

from .pipeline_report import PipelineReport
from .stage_modules import StageModule
from .tied_gradients import StepGradients


class StageParameters:
    """This rank's parameters and buffers, of its stages.

    Attributes:
        report: How the model was split.
        data_parallel: The ranks that hold the same stages, each with a batch of its own; None without data parallelism.
        shards: This rank's parameters, partitioned over those ranks, under their names; None without data parallelism.
    """

    def __init__(
        self,
        *,
        stages: Mapping[int, StageModule],
        gradients: StepGradients,
        report: PipelineReport,
        sizes: Mapping[str, torch.Size],
        description: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        """Set up from this rank's stages, and the model's sizes and description for checkpoints."""
        self.report, self.data_parallel = report, gradients.copies
        self.shards = None if gradients.sharded is None else gradients.sharded.shards
        self._stages, self._gradients, self._device = stages, gradients, device
        self._sizes, self._description = sizes, description

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under their names in the model, each once. With ZeRO these are its shards."""
        if self.shards is not None:
            yield from self.shards.named_parameters()
            return
        seen: set[int] = set()
        for stage in self._stages.values():
            for name, parameter in stage.graph_module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters (with ZeRO its shards) and buffers under their names in the model, detached."""
        found: dict[str, Tensor] = {}
        for stage in self._stages.values():
            found.update(stage.graph_module.state_dict())
        return found | {name: parameter.detach() for name, parameter in self.named_parameters()}

    def full_parameters(self) -> dict[str, Tensor]:
        """Return the full parameters of this rank's stages, by their names in the model, in memory of their own.

        The ranks that hold the same stages call it together.
        """
        tensors = self.checkpoint_tensors()
        full = {name: tensors.full(name, value.detach()) for name, value in self.named_parameters()}
        return {name: full_value(value).clone() for name, value in full.items()}

    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        optimizer: Optimizer | None = None,
        *,
        tag: str = "state",
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Save parameters, buffers and an optimizer, for any layout. All ranks call it.

        The format is that of an engine's checkpoints. During the call a rank holds the full tensors of its
        tensor-parallel slices. Running statistics are those of the first data-parallel rank. A checkpoint of the same
        tag is replaced when the new one is complete.

        Args:
            folder: A folder on a file system that all ranks share.
            optimizer: An optimizer of `parameters()`.
            tag: Name of the checkpoint in the folder.
            more: Values that `load_checkpoint` returns, of the types that `client_state` of an engine keeps.

        Raises:
            CheckpointError: It could not be written; all ranks raise.
        """
        ModelTraining(self.agreement, self.checkpoint_tensors, optimizer).save(Path(folder), tag, more)

    def load_checkpoint(
        self, folder: str | os.PathLike[str], optimizer: Optimizer | None = None, *, tag: str = "state"
    ) -> dict[str, Any]:
        """Load a checkpoint of this or any other layout, converted to this model's dtypes. All ranks call it.

        Args:
            folder: Folder of checkpoints.
            optimizer: An optimizer of `parameters()`, of the class that was saved or one with no other options. Its
                state and options are loaded, and in the same layout random states. None: only the model is loaded.
            tag: Name of the checkpoint in the folder.

        Returns:
            The argument `more` of `save_checkpoint`.

        Raises:
            CheckpointError: There is no such checkpoint, it is damaged, or it is not of this model. All ranks
                raise; nothing was changed.
        """
        found = ModelTraining(self.agreement, self.checkpoint_tensors, optimizer).load(Path(folder), tag)
        assert found is not None, "a tag was given"
        return found[1]

    @property
    def agreement(self) -> Agreement:
        """The ranks that save and load together: all ranks."""
        world = dist.group.WORLD
        assert world is not None
        return Agreement(tuple(range(dist.get_world_size())), group_timeout(world, self._device.type))

    def checkpoint_tensors(self) -> ModelTensors:
        """Return this rank's parameters and buffers as a checkpoint stores them."""
        values: dict[str, Tensor] = {name: parameter.detach() for name, parameter in self.named_parameters()}
        unsaved = set[str]()
        for stage in self._stages.values():
            buffers = {name: value for name, value in stage.graph_module.named_buffers() if name in self._sizes}
            values.update(buffers)
            own = {id(buffer) for buffer in stage.written}
            if self.data_parallel is not None and self.data_parallel.rank() > 0:  # the first rank saves its statistics
                unsaved |= {name for name, value in buffers.items() if id(value) in own}
        pp, dp = len(self.report.stages_of_ranks), self.data_parallel.size() if self.data_parallel else 1
        return ModelTensors(
            parameters=dict(self.named_parameters()),
            values=values,
            sizes=self._sizes,
            description=self._description,
            put=partial(copy_into, values),
            layout={"dp": dp, "tp": dist.get_world_size() // (dp * pp), "pp": pp},
            slices=self._gradients.slices,
            unsaved=unsaved,
        )

    def zero_grad(self) -> None:
        """Set this rank's gradients to None."""
        for parameter in self.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all ranks' gradients so that their joint 2-norm is at most `max_norm`; a tied parameter counts once.

        All ranks call it together. If a gradient is not finite, all gradients stay as they are.

        Returns:
            The norm before, a float32 scalar, the same on every rank.
        """
        norm = self.local_gradients().unscale_and_clip(scale=1.0, max_norm=max_norm)
        return torch.tensor(norm, dtype=torch.float32, device=self._device)

    def local_gradients(self) -> LocalGradients:
        """Return this rank's part of the step's gradients."""
        return self._gradients.local(dict(self.named_parameters()))

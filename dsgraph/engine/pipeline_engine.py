"""The engine of a model that is divided over dp x tp x pp ranks: `PipelineEngine`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dsgraph.checkpoint.checkpoint_match import why_no_client_state
from dsgraph.checkpoint.step_counts import StepCounts
from dsgraph.compat.tensors import flatten_tree, unflatten_tree
from dsgraph.parallel.pipeline.pipelined import PipelinedModel
from dsgraph.utils.errors import CheckpointError

from .config.read_config import ResolvedConfig
from .data import RankLoader, batches_of


class PipelineEngine:
    """Trains a divided model by whole steps: `train_batch` runs all micro-batches, clips, and steps.

    Attributes:
        module: This rank's part of the model.
        optimizer: Of that part's parameters.
        lr_scheduler: What is stepped behind it, if anything.
        resolved: The configuration.
        counts: How far training is.
        training_dataloader: The loader of the training data that `initialize` was given, if any.
    """

    def __init__(
        self,
        module: PipelinedModel,
        resolved: ResolvedConfig,
        *,
        optimizer: Optimizer,
        lr_scheduler: Any = None,
        loader: RankLoader | None = None,
    ) -> None:
        self.module, self.resolved = module, resolved
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.training_dataloader = loader
        self.counts = StepCounts()
        self._norm: float | None = None

    def train_batch(self, data: Iterator[Any] | None = None) -> Tensor:
        """One step.

        Args:
            data: Gives a micro-batch at a time, equal on all ranks but those of `dp`: the model's argument, a tuple of
                them, or a dict of keywords. None: those of `training_dataloader`, epoch after epoch.

        Returns:
            The mean of the losses over all micro-batches and ranks, detached.

        Raises:
            EngineError: There is no data.
            OptionError: A micro-batch is not like the example.
        """
        data = batches_of(self.training_dataloader) if data is None else data
        count = self.resolved.batch.micro_batches
        args, kwargs = as_arguments(_joined([next(data) for _ in range(count)]))
        loss = self.module.step(*args, **kwargs)
        largest = self.resolved.config.gradient_clipping
        if largest:
            self._norm = self.module.local_gradients().unscale_and_clip(scale=1.0, max_norm=largest)
        self.optimizer.step()
        self.module.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.counts.micro += count
        self.counts.steps += 1
        every = self.resolved.config.steps_per_print
        if every and self.counts.steps % every == 0 and dist.get_rank() == 0:
            print(f"dsgraph: step {self.counts.steps}: loss {loss:.4f}, rate {self.get_lr()[0]:.3g}", flush=True)
        return loss

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before they were clipped; None where nothing asked for it."""
        return self._norm

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far."""
        return self.counts.steps

    def save_checkpoint(
        self, save_dir: str | PathLike[str], tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> bool:
        """Writes model, optimizer, schedule and counts, for any layout. All ranks call it.

        Args:
            save_dir: Folder of checkpoints, which all ranks see.
            tag: Name of this one; None: `global_step<N>`.
            client_state: A dict of what `load_checkpoint` gives back, equal on all ranks: values that
                `dsgraph.utils.typed_json.encode` takes.

        Returns:
            True.

        Raises:
            CheckpointError: A value cannot be kept, or the checkpoint cannot be written; all ranks raise.
                A wrong `client_state` raises on the rank that passes it.
        """
        problem = why_no_client_state(client_state)
        if problem:
            raise CheckpointError(f"save_checkpoint: {problem}")
        schedule, loader = self.lr_scheduler, self.training_dataloader
        progress = {
            "counts": asdict(self.counts),
            "rates": self.get_lr(),
            "schedule": schedule.state_dict() if hasattr(schedule, "state_dict") else None,
            "loader": None if loader is None else loader.state_dict(),
            "client_state": dict(client_state or {}),
        }
        name = f"global_step{self.counts.steps}" if tag is None else tag
        self.module.save_checkpoint(save_dir, self.optimizer, tag=name, more=progress)
        return True

    def load_checkpoint(
        self, load_dir: str | PathLike[str], tag: str | None = None
    ) -> tuple[str | None, dict[str, Any]]:
        """Goes on from what `save_checkpoint` wrote, in this or any other layout. All ranks call it.

        Args:
            load_dir: Folder of checkpoints.
            tag: Which one; None: the latest.

        Returns:
            The checkpoint's folder and the client's state; None and an empty dict where there is no checkpoint yet.

        Raises:
            CheckpointError: There is no such checkpoint, or it is of another model.
        """
        found = self.module.load_newest(load_dir, self.optimizer, tag=tag)
        if found is None:
            return None, {}
        name, progress = found
        self.counts = StepCounts(**progress["counts"])
        if progress["schedule"] is not None and hasattr(self.lr_scheduler, "load_state_dict"):
            self.lr_scheduler.load_state_dict(progress["schedule"])
        for group, rate in zip(self.optimizer.param_groups, progress["rates"], strict=True):
            group["lr"] = rate
        if self.training_dataloader is not None:
            self.training_dataloader.load_state_dict(progress["loader"])
        return str(Path(load_dir) / name), progress["client_state"]


def as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model's arguments in a micro-batch: a dict of keywords, a tuple of arguments, or the one argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _joined(batches: Sequence[Any]) -> Any:
    """Micro-batches as one batch: tensors one behind the other, anything else of the first."""
    leaves, spec = zip(*map(flatten_tree, batches), strict=True)
    together = zip(*leaves, strict=True)
    joined = [torch.cat(same) if isinstance(same[0], Tensor) and same[0].ndim else same[0] for same in together]
    return unflatten_tree(joined, spec[0])

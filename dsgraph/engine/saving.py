"""How an engine is written to a checkpoint, and goes on from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dsgraph.errors import CheckpointError

from . import checkpoints, loading
from .asynchronous import Writer
from .config import EngineConfig
from .data import RankLoader
from .loss_scale import LossScale
from .mpu import ModelParallel
from .progress import StepCounts
from .quantize_training import QuantizedTraining


class Saving:
    """Checkpoints of an engine, which has these attributes."""

    module: nn.Module
    optimizer: Optimizer
    lr_scheduler: Any
    loss_scale: LossScale
    counts: StepCounts
    training_dataloader: RankLoader | None
    quantized_training: QuantizedTraining | None
    _writer: Writer
    _shared: ModelParallel | None

    @property
    def config(self) -> EngineConfig:
        """What the configuration says."""
        raise NotImplementedError

    def has_begun_step(self) -> bool:
        """Whether there are gradients of a step that is not over."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gives up the gradients of the step so far."""
        raise NotImplementedError

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        asynchronous: bool = False,
    ) -> bool:
        """Writes model, optimizer, schedule, scale, counts and random numbers. All ranks call it at the same point.

        Whatever interrupts it, the checkpoint before stays whole, and the latest.

        Args:
            save_dir: Folder of checkpoints.
            tag: Name of this one; None: `global_step<N>`.
            client_state: What `load_checkpoint` gives back: what JSON can hold.
            asynchronous: Whether to return when the tensors are copied, and write the copies while training goes on.
                The checkpoint is there when `wait_for_checkpoint` returns, which the next saving or loading calls.

        Returns:
            True.

        Raises:
            CheckpointError: It could not be written, or the one before it that is asynchronous, and all ranks raise;
                a step is not over, whose gradients no checkpoint holds; `asynchronous` with something on disk; or a
                load or step that failed has left on disk what is neither old nor new.
        """
        self._refuse_slices()
        if self.has_begun_step():
            raise CheckpointError(
                "save_checkpoint amid a step of micro-batches, whose gradients a checkpoint does not hold: call it "
                "behind the step() of the last micro-batch"
            )
        if asynchronous and loading.is_on_disk(self, module_only=False):
            raise CheckpointError(
                "save_checkpoint(asynchronous=True): it writes copies, and parameters or the optimizer's state lie on "
                "disk: copies in memory would take what that spares, and a copy on the disk as long as the checkpoint "
                "itself: leave asynchronous out"
            )
        self.wait_for_checkpoint()
        checkpoints.save(
            *(self, Path(save_dir), tag or f"global_step{self.counts.steps}", client_state or {}),
            writer=self._writer if asynchronous else None,
        )
        return True

    def _refuse_slices(self) -> None:
        """Ranks of an `mpu` hold slices under one name, of which a checkpoint would keep one."""
        if self._shared is not None:
            raise CheckpointError(
                "checkpoints of a model that an mpu shares out are not there yet: save module.state_dict() of each rank"
            )

    def wait_for_checkpoint(self) -> None:
        """Returns when the checkpoint that is being written is complete, at once where there is none.

        All ranks call it at the same point: at the end of training, before the process group is given up.

        Raises:
            CheckpointError: It could not be written, and all ranks raise; the checkpoint before stays the latest.
        """
        self._writer.wait(self.module)

    def load_checkpoint(
        self, load_dir: str | PathLike[str], tag: str | None = None, *, load_module_only: bool = False
    ) -> tuple[str | None, dict[str, Any]]:
        """Goes on from a checkpoint, which another stage or number of ranks may have written.

        Args:
            load_dir: Folder of checkpoints.
            tag: Which one; None: the latest.
            load_module_only: Whether to leave optimizer, schedule, scale and counts as they are.

        Returns:
            The checkpoint's folder and the client's state; None and an empty dict where there is no checkpoint yet.

        Raises:
            CheckpointError: There is no such checkpoint, it is damaged, or of another model; all ranks raise.
        """
        self._refuse_slices()
        self.wait_for_checkpoint()
        found = loading.load(self, Path(load_dir), tag, module_only=load_module_only)
        if found is None:
            return None, {}
        self.zero_grad()
        path, client_state = found
        return str(path), client_state

    def progress(self) -> dict[str, Any]:
        """How far training is, as JSON values: what a checkpoint holds besides tensors."""
        schedule = self.lr_scheduler.state_dict() if hasattr(self.lr_scheduler, "state_dict") else None
        loader = self.training_dataloader
        return {
            "counts": asdict(self.counts),
            "loss_scale": self.loss_scale.state_dict(),
            "schedule": schedule,
            "loader": None if loader is None else loader.state_dict(),
            "quantized": None if self.quantized_training is None else self.quantized_training.state_dict(),
        }

    def why_not(self, progress: Mapping[str, Any]) -> str:
        """Why `go_on_from` cannot take over what `progress` gave; empty where it can."""
        loader, quantized = self.training_dataloader, self.quantized_training
        problem = "" if quantized is None else quantized.why_not(progress.get("quantized"))
        return problem or ("" if loader is None else loader.why_not(progress.get("loader")))

    def go_on_from(self, progress: Mapping[str, Any]) -> None:
        """Takes over what `progress` gave in another run."""
        self.counts = StepCounts(**progress["counts"])
        self.loss_scale.load_state_dict(progress["loss_scale"])
        takes = hasattr(self.lr_scheduler, "load_state_dict")
        if progress["schedule"] is not None and takes:
            self.lr_scheduler.load_state_dict(progress["schedule"])
        elif takes != (progress["schedule"] is not None) and dist.get_rank() == 0:
            has, lacks = ("the engine", "the checkpoint") if takes else ("the checkpoint", "the engine")
            print(f"dsgraph: load_checkpoint: {has} has a schedule of learning rates, and {lacks} none", flush=True)
        if self.quantized_training is not None:
            self.quantized_training.load_state_dict(progress["quantized"])
        if self.training_dataloader is not None:  # older checkpoints hold no position
            self.training_dataloader.load_state_dict(progress.get("loader"))

"""Checkpoints of a pipeline's stages, for any layout."""

from __future__ import annotations

from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from dsgraph.checkpoint.checkpoint_match import why_no_client_state
from dsgraph.checkpoint.step_counts import StepCounts
from dsgraph.parallel.pipeline.pipelined import PipelinedModel
from dsgraph.utils.errors import CheckpointError

from .training_state import TrainingState


class PipelineCheckpoints:
    """Saves and loads full tensors of this rank's stages, with the progress of training."""

    def __init__(self, module: PipelinedModel, state: TrainingState) -> None:
        self._module, self._state = module, state

    def save(
        self, folder: str | PathLike[str], tag: Any, client_state: dict[str, Any] | None, *, asynchronous: bool
    ) -> None:
        """Write a checkpoint."""
        problem = why_no_client_state(client_state)
        if problem:
            raise CheckpointError(f"save_checkpoint: {problem}")
        if asynchronous:
            raise CheckpointError(_unsupported("save_checkpoint(asynchronous=True)"))
        state, schedule, loader = self._state, self._state.lr_scheduler, self._state.loader
        progress = {
            "counts": asdict(state.counts),
            "rates": state.get_lr(),
            "schedule": schedule.state_dict() if hasattr(schedule, "state_dict") else None,
            "loader": None if loader is None else loader.state_dict(),
            "client_state": dict(client_state or {}),
        }
        name = f"global_step{state.counts.steps}" if tag is None else str(tag)
        self._module.save_checkpoint(folder, state.optimizer, tag=name, more=progress)

    def load(self, folder: str | PathLike[str], tag: Any, *, module_only: bool) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint. Return its folder and the client's state."""
        if module_only:
            raise CheckpointError(_unsupported("load_checkpoint(load_module_only=True)"))
        state = self._state
        found = self._module.load_newest(folder, state.optimizer, tag=None if tag is None else str(tag))
        if found is None:
            return None, {}
        name, progress = found
        state.counts = StepCounts(**progress["counts"])
        if progress["schedule"] is not None and hasattr(state.lr_scheduler, "load_state_dict"):
            state.lr_scheduler.load_state_dict(progress["schedule"])
        for group, rate in zip(state.optimizer.param_groups, progress["rates"], strict=True):
            group["lr"] = rate
        if state.loader is not None:
            state.loader.load_state_dict(progress["loader"])
        return str(Path(folder) / name), progress["client_state"]

    def wait(self) -> None:
        """Return at once: a checkpoint is complete when `save` returns."""

    def close(self) -> None:
        """Return at once."""

    def export(self, folder: Path, *, shard_bytes: int, dtype: torch.dtype | None) -> None:
        """Raise an error."""
        raise CheckpointError(_unsupported("export"))

    def load_pretrained(self, folder: Path) -> None:
        """Raise an error."""
        raise CheckpointError(_unsupported("load_pretrained"))


def _unsupported(call: str) -> str:
    return f"{call} is not supported with the section parallel"

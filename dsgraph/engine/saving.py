"""Checkpoints of an engine: saving, loading, and the weights as safetensors."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch

from dsgraph.checkpoint import hugging_face
from dsgraph.checkpoint.asynchronous_save import Writer
from dsgraph.checkpoint.checkpoint_files import check_tag
from dsgraph.checkpoint.checkpoint_match import why_no_client_state
from dsgraph.checkpoint.load import is_on_disk, load
from dsgraph.checkpoint.same_call import one_tag
from dsgraph.checkpoint.save import save
from dsgraph.parallel.pipeline.pipelined import PipelinedModel
from dsgraph.utils.errors import CheckpointError

from .training_state import TrainingState


class Checkpoints:
    """Saves and loads what an engine trains, in every layout. All ranks call its methods at the same points."""

    def __init__(self, state: TrainingState) -> None:
        self._state, self._writer = state, Writer()

    def save(
        self, folder: str | PathLike[str], tag: Any, client_state: dict[str, Any] | None, *, asynchronous: bool
    ) -> None:
        """Write a checkpoint; see `Engine.save_checkpoint`."""
        state = self._state
        self._refuse_slices()
        chosen = one_tag(
            *(state.agreement, "save_checkpoint"),
            tag=f"global_step{state.counts.steps}" if tag is None else tag,
            validation=state.config.checkpoint.tag_validation,
            problem=self._why_not_save(asynchronous) or why_no_client_state(client_state),
            same={"save_dir": str(Path(folder).absolute()), "asynchronous": asynchronous},
        )
        self.wait()
        save(
            *(state, Path(folder), check_tag(chosen)),
            client_state=client_state or {},
            config=state.config.model_dump(mode="json"),
            writer=self._writer if asynchronous else None,
        )

    def _why_not_save(self, asynchronous: bool) -> str:
        """Return why no checkpoint can be written now; empty if one can."""
        if self._state.has_begun_step:
            return (
                "save_checkpoint between the micro-batches of a step, whose gradients a checkpoint does not contain: "
                "call it after the step() of the last micro-batch, or after zero_grad()"
            )
        if asynchronous and is_on_disk(self._state.tensors(), self._state.optimizer, module_only=False):
            return (
                "save_checkpoint(asynchronous=True) is not supported with parameters or optimizer state on disk, "
                "because it would copy them into memory: remove asynchronous"
            )
        return ""

    def _refuse_slices(self) -> None:
        """Refuse a model with `mpu`: its ranks have slices of the same name, of which a checkpoint would keep one."""
        if self._state.shared is not None:
            raise CheckpointError("checkpoints with mpu= are not supported: save module.state_dict() of each rank")

    def load(self, folder: str | PathLike[str], tag: Any, *, module_only: bool) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint; see `Engine.load_checkpoint`."""
        self._refuse_slices()
        chosen = one_tag(
            *(self._state.agreement, "load_checkpoint"),
            tag=tag,
            validation=self._state.config.checkpoint.tag_validation,
            same={"load_dir": str(Path(folder).absolute()), "load_module_only": module_only},
        )
        self.wait()
        found = load(self._state, Path(folder), chosen, module_only=module_only)
        return (None, {}) if found is None else (str(found[0]), found[1])

    def wait(self) -> None:
        """Return when the checkpoint that is being written is complete."""
        self._writer.wait()

    def close(self) -> None:
        """Wait, and destroy the process group of the writing threads."""
        self._writer.close()

    def export(self, folder: Path, *, shard_bytes: int, dtype: torch.dtype | None) -> None:
        """Write the model as safetensors; see `Engine.export`."""
        self._refuse_stages("export")
        hugging_face.export(self._state, folder, shard_bytes=shard_bytes, dtype=dtype)

    def load_pretrained(self, folder: Path) -> None:
        """Load the model from safetensors; see `Engine.load_pretrained`."""
        self._refuse_stages("load_pretrained")
        hugging_face.load_pretrained(self._state, folder)

    def _refuse_stages(self, call: str) -> None:
        if isinstance(self._state.module, PipelinedModel):
            raise CheckpointError(f"{call} is not supported with pipeline stages")

"""Checkpoints of a model and its optimizer without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from dsgraph.ranks.agreement import Agreement

from .checkpoint_match import why_no_client_state
from .load import load
from .model_tensors import ModelTensors
from .same_call import one_tag
from .save import save
from .step_counts import StepCounts, progress_at


@dataclass(frozen=True)
class ModelTraining:
    """A model and its optimizer, whose checkpoints have no schedule, loss scale and data."""

    agreement: Agreement
    tensors: Callable[[], ModelTensors]
    optimizer: Optimizer | None

    def save(self, folder: Path, tag: str, client_state: Mapping[str, Any] | None) -> None:
        """Write a checkpoint, see `save`."""
        self._agree("save_checkpoint", folder, tag, problem=why_no_client_state(client_state))
        save(self, folder, tag, client_state=client_state or {}, config={})

    def load(self, folder: Path, tag: str | None) -> tuple[Path, dict[str, Any]] | None:
        """Load a checkpoint, see `load`; without an optimizer only the model."""
        self._agree("load_checkpoint", folder, tag)
        return load(self, folder, tag, module_only=self.optimizer is None)

    def _agree(self, doing: str, folder: Path, tag: str | None, problem: str = "") -> None:
        same = {"folder": str(folder.absolute()), "tag": tag, "optimizer": self.optimizer is not None}
        one_tag(self.agreement, doing, tag=tag, validation="Fail", problem=problem, same=same)

    def progress(self) -> dict[str, Any]:
        """Return the progress of a training that has not begun."""
        return progress_at(StepCounts())

    def why_not(self, progress: Mapping[str, Any]) -> str:
        """Return an empty text: no progress is loaded."""
        return ""

    def take_schedule(self, progress: Mapping[str, Any]) -> None:
        """Load nothing."""

    def go_on_from(self, progress: Mapping[str, Any]) -> None:
        """Load nothing."""

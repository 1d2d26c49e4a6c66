"""How an engine is written to a checkpoint, and goes on from one."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dsgraph.checkpoint.asynchronous_save import Writer
from dsgraph.checkpoint.checkpoint_files import check_tag
from dsgraph.checkpoint.checkpoint_match import why_no_client_state
from dsgraph.checkpoint.load import is_on_disk, load
from dsgraph.checkpoint.same_call import one_tag
from dsgraph.checkpoint.save import save
from dsgraph.checkpoint.step_counts import StepCounts
from dsgraph.ranks.first_rank import tell
from dsgraph.utils.errors import CheckpointError, on_one_line

from .config.engine_config import EngineConfig
from .config.read_config import ResolvedConfig
from .data import RankLoader
from .integrations.mpu import ModelParallel
from .loss_scale import LossScale
from .techniques.quantize_training import QuantizedTraining


class Saving:
    """Checkpoints of an engine, which has these attributes."""

    module: nn.Module
    optimizer: Optimizer
    lr_scheduler: Any
    resolved: ResolvedConfig
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
        tag: str | int | float | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        asynchronous: bool = False,
    ) -> bool:
        """Writes model, optimizer, schedule, scale, counts and random numbers. All ranks call it at the same point.

        Whatever interrupts it, the checkpoint before stays whole, and the latest.

        Args:
            save_dir: Folder of checkpoints, the same on all ranks.
            tag: Name of the checkpoint; None: `global_step<N>`. If ranks differ, the first rank's tag is used, or
                all ranks raise, see `checkpoint.tag_validation` in the configuration.
            client_state: A dict of values that `load_checkpoint` returns with their types: numbers, text, bytes, paths,
                tensors, arrays, and dicts, lists, tuples and sets of them. The first rank's values are saved.
            asynchronous: Whether to return when the tensors are copied, and write the copies while training goes on.
                The checkpoint is complete when `wait_for_checkpoint` returns, which the next save or load calls, or
                when the program has ended.

        Returns:
            True.

        Raises:
            CheckpointError: It could not be written, and what was written is removed; or the one before it that is
                asynchronous; all ranks raise. Or a step is not over, whose gradients no checkpoint holds; another job
                writes the same checkpoint; `client_state` holds what a checkpoint does not keep; `asynchronous` with
                something on disk; or a load or step that failed has left on disk what is neither old nor new.
            RanksDisagreeError: Other ranks do not save.
        """
        self._refuse_slices()
        chosen = one_tag(
            *(self.module, "save_checkpoint"),
            tag=f"global_step{self.counts.steps}" if tag is None else tag,
            validation=self.config.checkpoint.tag_validation,
            problem=self._why_not_save(asynchronous) or why_no_client_state(client_state),
            same={"save_dir": str(Path(save_dir).absolute()), "asynchronous": asynchronous},
        )
        self.wait_for_checkpoint()
        save(
            *(self, Path(save_dir), check_tag(chosen), dict(client_state or {})),
            writer=self._writer if asynchronous else None,
        )
        return True

    def _why_not_save(self, asynchronous: bool) -> str:
        """Return why no checkpoint can be written now; empty if one can."""
        if self.has_begun_step():
            return (
                "save_checkpoint amid a step of micro-batches, whose gradients a checkpoint does not hold: call it "
                "behind the step() of the last micro-batch"
            )
        if asynchronous and is_on_disk(self, module_only=False):
            return (
                "save_checkpoint(asynchronous=True): it writes copies, and parameters or the optimizer's state lie on "
                "disk: copies in memory would take what that spares, and a copy on the disk as long as the checkpoint "
                "itself: leave asynchronous out"
            )
        return ""

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
        self, load_dir: str | PathLike[str], tag: str | int | float | None = None, *, load_module_only: bool = False
    ) -> tuple[str | None, dict[str, Any]]:
        """Goes on from a checkpoint, which another stage or number of ranks may have written.

        Args:
            load_dir: Folder of checkpoints.
            tag: Which one; None: the latest.
            load_module_only: Whether to leave optimizer, schedule, scale and counts as they are.

        Returns:
            The checkpoint's folder and the client's state; None and an empty dict where there is no checkpoint yet.

        Raises:
            CheckpointError: There is no such checkpoint, it is damaged, or of another model; all ranks raise, and the
                engine is unchanged.
        """
        self._refuse_slices()
        chosen = one_tag(
            *(self.module, "load_checkpoint"),
            tag=tag,
            validation=self.config.checkpoint.tag_validation,
            same={"load_dir": str(Path(load_dir).absolute()), "load_module_only": load_module_only},
        )
        self.wait_for_checkpoint()
        found = load(self, Path(load_dir), chosen, module_only=load_module_only)
        if found is None:
            return None, {}
        self.zero_grad()
        path, client_state = found
        return str(path), client_state

    def progress(self) -> dict[str, Any]:
        """Return the progress of training: the content of a checkpoint besides tensors."""
        schedule, loader = self.lr_scheduler, self.training_dataloader
        return {
            "counts": asdict(self.counts),
            "loss_scale": self.loss_scale.state_dict(),
            "schedule": schedule.state_dict() if hasattr(schedule, "state_dict") else None,
            "schedule_class": type(schedule).__name__,
            "loader": None if loader is None else loader.state_dict(),
            "quantized": None if self.quantized_training is None else self.quantized_training.state_dict(),
        }

    def why_not(self, progress: Mapping[str, Any]) -> str:
        """Why `go_on_from` cannot take over what `progress` gave; empty where it can."""
        loader, quantized = self.training_dataloader, self.quantized_training
        problem = "" if quantized is None else quantized.why_not(progress.get("quantized"))
        problem = problem or self.loss_scale.why_not(progress.get("loss_scale") or {})
        return problem or ("" if loader is None else loader.why_not(progress.get("loader")))

    def take_schedule(self, progress: Mapping[str, Any]) -> None:
        """Load the schedule from a result of `progress`. If only one side has a schedule, a line is printed.

        Raises:
            CheckpointError: The schedule cannot load it, and is unchanged.
        """
        schedule, state = self.lr_scheduler, progress["schedule"]
        takes, saved = hasattr(schedule, "load_state_dict"), progress.get("schedule_class")
        if takes != (state is not None):
            has, lacks = ("the engine", "the checkpoint") if takes else ("the checkpoint", "the engine")
            tell(f"load_checkpoint: {has} has a schedule of learning rates, and {lacks} none")
        if not takes or state is None:
            return
        own, before = type(schedule).__name__, deepcopy(schedule.state_dict())
        try:
            schedule.load_state_dict(state)
        except Exception as error:  # a user's schedule may raise any class
            schedule.load_state_dict(before)
            raise CheckpointError(
                f"its schedule of learning rates, {saved or 'of an import'}, does not fit the engine's {own} "
                f"({on_one_line(error)}): load_module_only=True takes the model alone"
            ) from error
        if saved not in (None, own):
            tell(f"load_checkpoint: its schedule of learning rates is {saved}, and the engine's is {own}")

    def go_on_from(self, progress: Mapping[str, Any]) -> None:
        """Load a result of `progress`, except for the schedule."""
        self.counts = StepCounts(**progress["counts"])
        # The number of micro-batches may have changed; a checkpoint is always at the beginning of a step.
        self.counts.micro = self.counts.steps * self.resolved.batch.micro_batches
        self.loss_scale.load_state_dict(progress["loss_scale"])
        if self.quantized_training is not None:
            self.quantized_training.load_state_dict(progress["quantized"])
        if self.training_dataloader is not None:  # an imported checkpoint has no position
            self.training_dataloader.load_state_dict(progress.get("loader"))

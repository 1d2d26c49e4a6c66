"""The state of training: the one object that all parts of an engine share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.optim import Optimizer

from dsgraph.checkpoint.model_tensors import ModelTensors
from dsgraph.checkpoint.step_counts import StepCounts
from dsgraph.optim.gradient_norm import LocalGradients, gradients_of
from dsgraph.optim.hooks import hooks_of
from dsgraph.parallel.pipeline.pipelined import PipelinedModel
from dsgraph.partitioning.state import PartitionState, partition_states
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.first_rank import print_notes
from dsgraph.utils.errors import CheckpointError, on_one_line

from .config.engine_config import EngineConfig
from .config.read_config import ResolvedConfig
from .data import RankLoader
from .integrations.mpu import ModelParallel
from .loss_scale import LossScale
from .techniques.layer_drop import ProgressiveLayerDrop
from .techniques.quantize_training import QuantizedTraining


@dataclass(eq=False)
class TrainingState:
    """The model, the optimizer and the progress of training.

    Attributes:
        module: The partitioned model; with pipeline stages a `PipelinedModel`, this rank's part.
        optimizer: The optimizer of its shards.
        resolved: The configuration.
        lr_scheduler: Steps after the optimizer; None without a schedule.
        loader: Loader of the training data; None without data.
        layer_drop: Leaves out blocks in training; None if the configuration does not ask for it.
        quantized: Quantizes weights in training; None if the configuration does not ask for it.
        shared: The ranks that share a model which its own code has made tensor-parallel; None without `mpu`.
        data_place: Number of this rank among the data-parallel ranks, and their number.
        loss_groups: Names of the process groups whose ranks compute losses of their own.
        boundary: Says whether the running micro-batch reduces the gradients of its step, for a loop that clips, steps
            and drops gradients itself, as one for accelerate does; None: the counts say it, and a step drops gradients.
        loss_scale: The factor of the loss.
        counts: Micro-batches and steps so far.
        norm: Global gradient norm of the last step before clipping; None if nothing asked for it.
        was_skipped: True if the last step updated nothing, since gradients were not finite.
        has_begun_step: True if there are gradients of a step that is not over.
        is_unscaled: True if the gradients have been divided by the loss scale.
    """

    module: Any
    optimizer: Optimizer
    resolved: ResolvedConfig
    lr_scheduler: Any = None
    loader: RankLoader | None = None
    layer_drop: ProgressiveLayerDrop | None = None
    quantized: QuantizedTraining | None = None
    shared: ModelParallel | None = None
    data_place: tuple[int, int] = (0, 1)
    loss_groups: tuple[str, ...] = ()
    boundary: Callable[[], bool] | None = None
    loss_scale: LossScale = field(init=False)
    counts: StepCounts = field(default_factory=StepCounts)
    norm: float | None = None
    was_skipped: bool = False
    has_begun_step: bool = False
    is_unscaled: bool = False

    def __post_init__(self) -> None:
        self.loss_scale = LossScale.of(self.config.fp16)

    @property
    def config(self) -> EngineConfig:
        """The sections of the configuration, with defaults."""
        return self.resolved.config

    @property
    def partition(self) -> PartitionState:
        """The parameters of a partitioned model."""
        (part,) = partition_states(self.module)
        return part

    @property
    def agreement(self) -> Agreement:
        """The ranks that save and load together."""
        return self.module.agreement if self._is_pipeline() else Agreement.over(self.partition.parameter_mesh)

    def tensors(self) -> ModelTensors:
        """Return the model's tensors on this rank."""
        return self.module.checkpoint_tensors() if self._is_pipeline() else ModelTensors.of(self.module)

    def _is_pipeline(self) -> bool:
        return isinstance(self.module, PipelinedModel)

    def gradients(self) -> LocalGradients:
        """Return this rank's part of the gradients."""
        shared = self.shared
        slices: dict[str, Any] = {} if shared is None else {"sliced": shared.sliced, "slicing": shared.group.group_name}
        return self.module.local_gradients() if self._is_pipeline() else gradients_of(self.partition, **slices)

    def unscale(self, *, max_norm: float = 0.0) -> float:
        """Divide the gradients by the loss scale, unless that is done, and clip them. All ranks call it together.

        Args:
            max_norm: The largest norm; 0 disables clipping.

        Returns:
            The global gradient norm before clipping. NaN after the warm-up of a 1-bit optimizer, when no rank has the
            averaged gradient: nothing is changed.
        """
        if hooks_of(self.optimizer).is_compressing:
            return math.nan
        scale = 1.0 if self.is_unscaled else self.loss_scale.scale
        norm = self.gradients().unscale_and_clip(scale=scale, max_norm=max_norm)
        self.norm, self.is_unscaled = self.norm if self.is_unscaled else norm, True
        return norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group of parameters."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def is_last_micro_batch(self) -> bool:
        """Return True if the running micro-batch is the last one of its step."""
        if self.boundary is not None:
            return self.boundary()
        return (self.counts.micro + 1) % self.resolved.batch.micro_batches == 0

    def progress(self) -> dict[str, Any]:
        """Return the progress of training: the content of a checkpoint besides tensors."""
        schedule, loader = self.lr_scheduler, self.loader
        return {
            "counts": asdict(self.counts),
            "loss_scale": self.loss_scale.state_dict(),
            "schedule": schedule.state_dict() if hasattr(schedule, "state_dict") else None,
            "schedule_class": type(schedule).__name__,
            "loader": None if loader is None else loader.state_dict(),
            "quantized": None if self.quantized is None else self.quantized.state_dict(),
        }

    def why_not(self, progress: Mapping[str, Any]) -> str:
        """Return why `go_on_from` cannot load a result of `progress`; empty if it can."""
        problem = "" if self.quantized is None else self.quantized.why_not(progress.get("quantized"))
        problem = problem or self.loss_scale.why_not(progress.get("loss_scale") or {})
        return problem or ("" if self.loader is None else self.loader.why_not(progress.get("loader")))

    def take_schedule(self, progress: Mapping[str, Any]) -> None:
        """Load the schedule from a result of `progress`. If only one side has a schedule, a line is printed.

        Raises:
            CheckpointError: The schedule cannot load it, and is unchanged.
        """
        schedule, state = self.lr_scheduler, progress["schedule"]
        takes, saved = hasattr(schedule, "load_state_dict"), progress.get("schedule_class")
        if takes != (state is not None):
            has, lacks = ("the engine", "the checkpoint") if takes else ("the checkpoint", "the engine")
            print_notes(f"load_checkpoint: {has} has a schedule of learning rates, and {lacks} none")
        if not takes or state is None:
            return
        own, before = type(schedule).__name__, deepcopy(schedule.state_dict())
        try:
            schedule.load_state_dict(state)
        except Exception as error:  # a user's schedule may raise any class
            schedule.load_state_dict(before)
            raise CheckpointError(
                f"its schedule of learning rates, {saved or 'of an import'}, does not fit the engine's {own} "
                f"({on_one_line(error)}): load_module_only=True loads only the model"
            ) from error
        if saved not in (None, own):
            print_notes(f"load_checkpoint: its schedule of learning rates is {saved}, and the engine's is {own}")

    def go_on_from(self, progress: Mapping[str, Any]) -> None:
        """Load a result of `progress`, except for the schedule."""
        self.counts = StepCounts(**progress["counts"])
        # The number of micro-batches may have changed; a checkpoint is always at the beginning of a step.
        self.counts.micro = self.counts.steps * self.resolved.batch.micro_batches
        self.loss_scale.load_state_dict(progress["loss_scale"])
        if self.quantized is not None:
            self.quantized.load_state_dict(progress["quantized"])
        if self.loader is not None:  # an imported checkpoint has no position
            self.loader.load_state_dict(progress.get("loader"))

"""Read access to an engine: its parts, sizes, counts and rates, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dsgraph.checkpoint.step_counts import StepCounts

from .config.engine_config import EngineConfig
from .config.read_config import ResolvedConfig
from .data import RankLoader
from .loss_scale import LossScale
from .monitoring.flops_profiler import ModuleProfile
from .monitoring.step_logger import StepLogger
from .techniques.layer_drop import ProgressiveLayerDrop
from .techniques.quantize_training import QuantizedTraining
from .training_state import TrainingState


class EngineInfo(nn.Module):
    """The read-only part of an engine.

    Attributes:
        module: The partitioned model; with pipeline stages a `PipelinedModel`, this rank's part.
    """

    module: Any

    def __init__(self, state: TrainingState, logger: StepLogger) -> None:
        super().__init__()
        self.module = state.module
        self._state, self._logger = state, logger

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the model's shards."""
        return self._state.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The schedule of learning rates, which steps after the optimizer; None without one."""
        return self._state.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self._state.lr_scheduler = schedule

    @property
    def training_state(self) -> TrainingState:
        """The state that the parts of the engine share."""
        return self._state

    @property
    def resolved(self) -> ResolvedConfig:
        """The configuration with what follows from it."""
        return self._state.resolved

    @property
    def config(self) -> EngineConfig:
        """The sections of the configuration, with defaults."""
        return self._state.config

    @property
    def loss_scale(self) -> LossScale:
        """The factor by which the loss is multiplied."""
        return self._state.loss_scale

    @property
    def counts(self) -> StepCounts:
        """Micro-batches and steps so far."""
        return self._state.counts

    @property
    def training_dataloader(self) -> RankLoader | None:
        """The loader of the training data that `initialize` was given; None without data."""
        return self._state.loader

    @property
    def quantized_training(self) -> QuantizedTraining | None:
        """Quantizes weights in training; None if the configuration does not ask for it."""
        return self._state.quantized

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """Leaves out blocks of the model in training; None if the configuration does not ask for it."""
        return self._state.layer_drop

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and parameters of this rank, as `torch.nn.Module` does."""
        if isinstance(self.module, nn.Module):
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
        else:
            outer = f"{prefix}.module" if prefix else "module"
            yield from ((f"{outer}.{name}", param) for name, param in self.module.named_parameters())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return parameters and buffers of this rank, as `torch.nn.Module` does."""
        if isinstance(self.module, nn.Module):
            return super().state_dict(*args, **kwargs)
        return {f"module.{name}": value for name, value in self.module.state_dict().items()}

    def train_batch_size(self) -> int:
        """Return the samples of a step over all ranks."""
        return self.resolved.batch.step

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch of one rank."""
        return self.resolved.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step."""
        return self.resolved.batch.micro_batches

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self.config.zero_optimization.stage

    @property
    def dp_rank(self) -> int:
        """The number of this rank among the data-parallel ranks, each of which takes batches of its own."""
        return self._state.data_place[0]

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks."""
        return self._state.data_place[1]

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, the skipped ones included."""
        return self.counts.steps

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite."""
        return self.counts.skipped

    def was_step_skipped(self) -> bool:
        """Return True if the last step updated nothing, since gradients were not finite."""
        return self._state.was_skipped

    def has_begun_step(self) -> bool:
        """Return True if there are gradients of a step that is not over."""
        return self._state.has_begun_step

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the running micro-batch is the last one of its step."""
        return self._state.is_last_micro_batch()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return self._state.get_lr()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients before they were clipped.

        None if nothing asked for it, and after the warm-up of a 1-bit optimizer: then no rank sees the averaged
        gradient.
        """
        return self._state.norm

    def timings(self) -> dict[str, float]:
        """Return milliseconds a step of forward, backward, step, gather and reduce, if `wall_clock_breakdown` is on.

        Means over the steps up to the last printed line, or over all so far if none was printed. Gathers and
        reductions run beside the others. They are timed in steps that print a line, and are of the last of those.
        """
        return self._logger.timings()

    def flops_profile(self) -> tuple[ModuleProfile, ...]:
        """Return the profile of each module, if `flops_profiler` is on and its step is over; the model comes first."""
        return self._logger.profiler.modules if self._logger.profiler is not None else ()

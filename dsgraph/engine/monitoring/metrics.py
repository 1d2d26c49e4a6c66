"""What an engine tells of itself: sizes, counts and rates, under DeepSpeed's names."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from dsgraph.checkpoint.step_counts import StepCounts
from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.engine.config.read_config import ResolvedConfig
from dsgraph.partitioning.state import PartitionState, partition_states

from .flops_profiler import ModuleProfile
from .step_logger import Looks


class Figures:
    """The figures of an engine, which has these attributes."""

    module: nn.Module
    optimizer: Optimizer
    resolved: ResolvedConfig
    counts: StepCounts
    _looks: Looks
    _was_skipped: bool

    @property
    def config(self) -> EngineConfig:
        """What the configuration says, with defaults."""
        return self.resolved.config

    @property
    def _partition(self) -> PartitionState:
        (part,) = partition_states(self.module)
        return part

    def train_batch_size(self) -> int:
        """Samples of a step over all ranks."""
        return self.resolved.batch.step

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch of one rank."""
        return self.resolved.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.resolved.batch.micro_batches

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self._partition.zero.number

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, the skipped ones included."""
        return self.counts.steps

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite."""
        return self.counts.skipped

    def was_step_skipped(self) -> bool:
        """Whether the last step updated nothing, since gradients were not finite."""
        return self._was_skipped

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def timings(self) -> dict[str, float]:
        """Milliseconds a step of forward, backward and step, if `wall_clock_breakdown` is on, and of gather and reduce.

        Means over the steps up to the last printed line, or over all so far where none was printed. Gathers and
        reductions run beside the others. They are timed in steps that print a line, and of the last of those.
        """
        return self._looks.timings()

    def flops_profile(self) -> tuple[ModuleProfile, ...]:
        """What each module computes, if `flops_profiler` is on and its step is over; the model itself comes first."""
        return self._looks.profiler.modules if self._looks.profiler is not None else ()

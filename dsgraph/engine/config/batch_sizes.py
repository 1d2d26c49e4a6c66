"""The three batch sizes: samples of a step = samples of a micro-batch x micro-batches x data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from dsgraph.utils.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes that agree.

    Attributes:
        step: Samples of a step over all ranks.
        micro: Samples of a micro-batch of one rank.
        micro_batches: Micro-batches of a step.
    """

    step: int
    micro: int
    micro_batches: int

    @classmethod
    def solve(cls, step: int | None, micro: int | None, micro_batches: int | None, *, ranks: int) -> BatchSizes:
        """Compute the missing sizes; if only the step is given, `micro_batches` is 1.

        Raises:
            ConfigError: Too few sizes are given, or they contradict each other.
        """
        if step is None:
            if micro is None:
                raise ConfigError(
                    "config: no batch size; set train_batch_size or train_micro_batch_size_per_gpu, or two of these "
                    "and gradient_accumulation_steps"
                )
            micro_batches = micro_batches or 1
            return cls(micro * micro_batches * ranks, micro, micro_batches)
        if micro is None:
            micro_batches = micro_batches or 1
            micro = step // (micro_batches * ranks)
        elif micro_batches is None:
            micro_batches = step // (micro * ranks)
        if micro * micro_batches * ranks != step or micro < 1 or micro_batches < 1:
            raise ConfigError(
                f"config: train_batch_size {step} is not train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {micro_batches} x {ranks} ranks = {micro * micro_batches * ranks}"
            )
        return cls(step, micro, micro_batches)

"""The report on the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsgraph.passes.parallel.split_stages import StagePlan


@dataclass(frozen=True)
class PipelineReport:
    """A report on the stages of a pipeline.

    Attributes:
        schedule: Its name.
        microbatches: Micro-batches of a step.
        stages_of_ranks: The stages of each rank.
        costs: Predicted seconds of each stage's forward of one micro-batch.
        cut_bytes: Bytes over each boundary, one way, for one micro-batch.
        balance: The most loaded stage over the mean.
        tied: Parameters that several stages read, with these stages.
        actions: What each rank computes, in order.
    """

    schedule: str
    microbatches: int
    stages_of_ranks: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]
    cut_bytes: tuple[int, ...]
    balance: float
    tied: Mapping[str, tuple[int, ...]]
    actions: Mapping[int, Sequence[str]]

    @staticmethod
    def of(plan: StagePlan, **facts: Any) -> PipelineReport:
        """Return the report on a plan."""
        return PipelineReport(costs=plan.costs, cut_bytes=plan.cut_bytes, balance=plan.balance, **facts)

"""The report on the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsgraph.passes.parallel.stages.split_stages import StagePlan


@dataclass(frozen=True)
class StageMemory:
    """The memory of one stage of this rank under a `memory_limit`.

    Attributes:
        stage: Its number.
        in_flight: The most micro-batches whose forward has run and whose backward has not.
        limit: Bytes that a step may use on this rank.
        peak: Predicted peak bytes of a step on this rank, with all its stages; the same for each of them. None if it is
            not known: a graph came from torch's cache, or nothing in it is trained.
        plan: What the stage saves, recomputes and offloads, as text.
    """

    stage: int
    in_flight: int
    limit: int
    peak: int | None
    plan: tuple[str, ...] = ()


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
        memory: The memory of this rank's stages; empty without a `memory_limit`, and before the first step.
    """

    schedule: str
    microbatches: int
    stages_of_ranks: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]
    cut_bytes: tuple[int, ...]
    balance: float
    tied: Mapping[str, tuple[int, ...]]
    actions: Mapping[int, Sequence[str]]
    memory: tuple[StageMemory, ...] = ()

    @staticmethod
    def of(plan: StagePlan, **facts: Any) -> PipelineReport:
        """Return the report on a plan."""
        return PipelineReport(costs=plan.costs, cut_bytes=plan.cut_bytes, balance=plan.balance, **facts)

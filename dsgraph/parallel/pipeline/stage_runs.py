"""The stages of a rank as torch's schedules run them, for each state of autocast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.fx import Node

from dsgraph.passes.parallel.stages.stage_graphs import StageGraph

from .captured_model import CapturedModel
from .fake_values import fake_values
from .schedule_order import SCHEDULES
from .stage_modules import LossOf, StageModule, TimedStage, stage_buffers


@dataclass(frozen=True)
class StageRun:
    """A schedule and the stages that it runs.

    Attributes:
        schedule: A schedule of torch for these stages.
        stages: This rank's stages.
        received: Stage -> fake values that it receives.
        sent: Stage -> fake values that it sends.
    """

    schedule: Any
    stages: tuple[TimedStage, ...]
    received: Mapping[int, Sequence[Tensor]]
    sent: Mapping[int, Sequence[Tensor]]


class StageRuns:
    """Stages and schedule for each state of `torch.autocast`, which changes the dtypes that stages send.

    Torch's schedules receive into buffers that are made once, with the dtypes of the capture. Values of another dtype
    would be misread.
    """

    def __init__(
        self,
        captured: CapturedModel,
        graphs: Sequence[StageGraph],
        mine: Mapping[int, StageModule],
        *,
        schedule: str,
        loss: LossOf,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Set up from all stages, and this rank's modules by stage number."""
        self._graph, self._device = captured.graph_module, device  # without the model's parameters
        self._boundaries = [(graph.received, graph.sent) for graph in graphs]
        self._mine, self._kind, self._loss, self._group = dict(mine), schedule, loss, group
        self._known: dict[str, StageRun] = {}

    def autocast(self) -> str:
        """Return the current state of `torch.autocast` as text."""
        kind = self._device.type
        return f"autocast to {torch.get_autocast_dtype(kind)}" if torch.is_autocast_enabled(kind) else "no autocast"

    def now(self) -> StageRun:
        """Return the stages and schedule for the current state of `torch.autocast`."""
        key = self.autocast()
        if key not in self._known:
            self._known[key] = self._made(fake_values(self._graph, self._device))
        return self._known[key]

    def drop(self) -> None:
        """Drop stages and schedules after a step that failed, because they keep its losses and deferred gradients."""
        self._known = {}

    def _made(self, values: Mapping[Node, Any]) -> StageRun:
        received = {number: [values[node] for node in self._boundaries[number][0]] for number in self._mine}
        sent = {number: [values[node] for node in self._boundaries[number][1]] for number in self._mine}
        stages = tuple(
            TimedStage(
                module,
                number,
                len(self._boundaries),
                self._device,
                input_args=stage_buffers(received[number], self._device),
                output_args=stage_buffers(sent[number], self._device),
                group=self._group,
                dw_builder=None if module.queue is None else module.queue.take,
            )
            for number, module in self._mine.items()
        )
        # The loss is divided, not the gradients: torch would divide those of a parameter of two stages of a rank twice.
        made: Any = get_schedule_class(self._kind)
        given = list(stages) if SCHEDULES[self._kind] else stages[0]
        schedule = made(given, self._loss.microbatches, loss_fn=self._loss, scale_grads=False)
        return StageRun(schedule, stages, received, sent)

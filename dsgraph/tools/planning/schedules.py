"""The order of a pipeline schedule, without ranks that could run it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from dsgraph.parallel.pipeline.schedule_order import SCHEDULES, actions_of, check_microbatches, stages_of_ranks
from dsgraph.tools.emission.harness import fake_ranks


def actions_on_paper(kind: str, *, ranks: int, stages: int, microbatches: int) -> dict[int, list[str]]:
    """Return what each rank would do, in order: see `actions_of`.

    Raises:
        OptionError: The schedule does not support this number of stages or micro-batches.
    """
    (own, *_) = stages_of_ranks(kind, ranks=ranks, stages=stages)
    check_microbatches(kind, ranks=ranks, stages=stages, microbatches=microbatches)
    if not SCHEDULES[kind]:
        return actions_of(None, kind, stages=stages, microbatches=microbatches)
    value = torch.empty(1)
    with fake_ranks(ranks):
        dist.init_process_group()
        held = [
            PipelineStage(nn.Identity(), number, stages, torch.device("cpu"), input_args=value, output_args=value)
            for number in own
        ]
        schedule = get_schedule_class(kind)(held, microbatches, loss_fn=lambda *_: value)
    return actions_of(schedule, kind, stages=stages, microbatches=microbatches)

"""Pipeline stages of torch."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage


class StageOfOtherRanks(PipelineStage):
    """A stage that opens links only to other ranks.

    A rank that holds two neighbours of a V would send a message to itself in torch 2.11, which gloo refuses.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

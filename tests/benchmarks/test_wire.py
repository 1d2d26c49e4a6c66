"""Bytes sent, from collectives that ran."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.wire import Collective, record_collectives, sent_bytes

FLOAT = 4  # bytes


@pytest.mark.parametrize(
    ("collective", "world", "expected"),
    [
        (Collective("allreduce_", (1000, 0)), 2, 1000),
        (Collective("allreduce_", (1000, 0)), 4, 1500),
        (Collective("_allgather_base_", (1000, 250)), 4, 750),
        (Collective("_reduce_scatter_base_", (250, 1000)), 4, 750),
        (Collective("alltoall_base_", (1000, 1000)), 4, 750),
        (Collective("broadcast_", (1000,)), 4, 750),
        (Collective("barrier", (1,)), 4, 0),
        (Collective("allreduce_", (1000,)), 1, 0),
    ],
)
def test_each_kind_sends_the_least_that_it_must(collective, world, expected):
    assert sent_bytes([collective], world) == expected
    assert sent_bytes([collective, collective], world) == 2 * expected


def test_an_unknown_kind_is_no_guess():
    assert sent_bytes([Collective("allreduce_", (8,)), Collective("telepathy_", (8,))], 2) is None


def test_graph_collectives_are_recorded(one_rank):
    ops = torch.ops._c10d_functional
    group = dist.group.WORLD.group_name
    shard, whole = torch.zeros(4, 5), torch.zeros(6, 5, dtype=torch.bfloat16)

    def run() -> None:
        ops.wait_tensor(ops.all_gather_into_tensor(shard, 1, group))
        ops.wait_tensor(ops.reduce_scatter_tensor(shard, "sum", 1, group))
        ops.wait_tensor(ops.all_to_all_single(shard, [4], [4], group))
        ops.wait_tensor(ops.all_reduce(whole, "sum", group))

    collectives = record_collectives(run)
    assert [collective.op for collective in collectives] == [
        "allgather_into_tensor_coalesced_",
        "reduce_scatter_tensor_coalesced_",
        "alltoall_base_",
        "allreduce_",
    ]
    assert sent_bytes(collectives, 2) == FLOAT * 20 * (1 + 1 + 0.5) + 2 * 30


def test_ddp_sends_every_gradient(one_rank):
    model = nn.parallel.DistributedDataParallel(nn.Linear(30, 40))
    collectives = record_collectives(lambda: model(torch.zeros(2, 30)).sum().backward())
    assert sent_bytes(collectives, 2) == FLOAT * (30 * 40 + 40)

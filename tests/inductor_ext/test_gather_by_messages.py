from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dsgraph.inductor_ext import start_gather

gather_by_messages = torch.ops.dsgraph.gather_by_messages
wait = torch.ops._c10d_functional.wait_tensor


@pytest.mark.parametrize("shape", [(4, 3), (1,), (0, 3)])
def test_opcheck(one_rank, shape):
    torch.library.opcheck(gather_by_messages.default, (torch.randn(shape), 1, dist.group.WORLD.group_name))


def _gather(shape: tuple[int, ...], dtype_name: str) -> None:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    dtype = getattr(torch, dtype_name)
    shards = torch.randn((world, *shape), generator=torch.Generator().manual_seed(0)).to(dtype)
    mine = shards[rank].clone()
    started = gather_by_messages(mine, world, group)
    mine.fill_(7)  # the shard is free as soon as the op returns
    assert torch.equal(wait(started), shards.flatten(0, 1))
    target = torch.empty((world * shape[0], *shape[1:]), dtype=dtype)
    start_gather(shards[rank], target, group)
    assert torch.equal(wait(target), shards.flatten(0, 1))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 3), "float32"), ((1,), "bfloat16"), ((2, 3, 5), "float16"), ((0, 3), "float32"), ((3,), "int64")],
)
@pytest.mark.parametrize("world", [2, 3])
def test_rows_arrive_in_rank_order(ranks, world, shape, dtype):
    ranks(world).run(_gather, shape, dtype)


def _overlap(rounds: int) -> None:
    """Gathers that are under way at the same time as others, and as the exchange that reduces gradients."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    sizes = (256 * 128, 128 * 384, 128 * 128, 128 * 512)
    for _ in range(rounds):
        shards = [torch.full((size // world,), float(rank + size)) for size in sizes]
        started = [gather_by_messages(shard, world, group) for shard in shards]
        for size, full in zip(sizes, started, strict=True):
            rows = size // world
            exchange = torch.ops.dsgraph.exchange_by_messages(torch.ones(size), world, group)
            by_rank = wait(full).view(world, rows)
            assert torch.equal(by_rank, (torch.arange(world) + float(size))[:, None].expand(world, rows))
            assert wait(exchange).sum() == size


@pytest.mark.distributed
def test_several_may_be_under_way_at_once(ranks):
    ranks(2).run(_overlap, 200)

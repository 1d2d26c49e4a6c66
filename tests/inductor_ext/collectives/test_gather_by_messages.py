from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dsgraph.inductor_ext import start_gather

gather_by_messages = torch.ops.dsgraph.gather_by_messages
coalesced = torch.ops.dsgraph.gather_by_messages_coalesced
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


def test_opcheck_of_several(one_rank):
    shards = [torch.randn(4, 3), torch.randn(0, 2), torch.randn(5)]
    torch.library.opcheck(coalesced.default, (shards, 1, dist.group.WORLD.group_name))


def _gather_several() -> None:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn((world, *shape), generator=generator) for shape in ((4, 3), (1,), (0, 2), (2, 3, 5))]
    mine = [part[rank].clone() for part in parts]
    started = coalesced(mine, world, group)
    for shard in mine:
        shard.fill_(7)  # the shards are free as soon as the op returns
    for full, part in reversed(list(zip(started, parts, strict=True))):  # each has a wait of its own, in any order
        assert torch.equal(wait(full), part.flatten(0, 1))


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_several_arrive_each_by_itself(ranks, world):
    ranks(world).run(_gather_several)


def _overlap_several(rounds: int) -> None:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    sizes = (256 * 128, 128 * 384, 128 * 128, 128 * 512)
    exchange = torch.ops.dsgraph.exchange_by_messages_coalesced
    for _ in range(rounds):
        started = coalesced([torch.full((size // world,), float(rank + size)) for size in sizes], world, group)
        exchanged = exchange([torch.full((size,), float(rank)) for size in sizes], world, group)
        again = coalesced([torch.full((3,), float(rank))] * 2, world, group)
        for size, full, sums in zip(sizes, started, exchanged, strict=True):
            assert torch.equal(wait(full).view(world, -1)[:, 0], torch.arange(world) + float(size))
            assert torch.equal(wait(sums).view(world, -1)[:, -1], torch.arange(world).float())
        assert all(torch.equal(wait(full), torch.arange(world).float().repeat_interleave(3)) for full in again)


@pytest.mark.distributed
def test_several_of_several_may_be_under_way_at_once(ranks):
    ranks(2).run(_overlap_several, 100)


def _compiled_several() -> None:
    import dsgraph.inductor_ext

    dsgraph.inductor_ext.register_lowerings()
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    exchange = torch.ops.dsgraph.exchange_by_messages_coalesced

    def function(a, b):
        started = coalesced([a * 2, b.t() + 1], world, group)
        exchanged = exchange([started_of_a := wait(started[0]), (a.t() * 3).t().repeat(world, 1)], world, group)
        return wait(started[1]) * 2, wait(exchanged[0]) + started_of_a, wait(exchanged[1]) - 1

    a, b = torch.arange(6.0).view(2, 3) + rank, torch.arange(8.0).view(4, 2) - rank
    for found, expected in zip(torch.compile(function, fullgraph=True)(a, b), function(a, b), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.full  # compiles kernels on both ranks
@pytest.mark.distributed
@pytest.mark.inductor
def test_inductor_runs_several_as_collectives(ranks):
    ranks(2).run(_compiled_several)

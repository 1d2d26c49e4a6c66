from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dsgraph.inductor_ext  # noqa: F401  # registers the op

exchange_by_messages = torch.ops.dsgraph.exchange_by_messages
coalesced = torch.ops.dsgraph.exchange_by_messages_coalesced
wait = torch.ops._c10d_functional.wait_tensor


@pytest.mark.parametrize("shape", [(4, 3), (1,), (0, 3)])
def test_opcheck(one_rank, shape):
    torch.library.opcheck(exchange_by_messages.default, (torch.randn(shape), 1, dist.group.WORLD.group_name))


def _exchange(shape: tuple[int, ...], dtype_name: str) -> None:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    dtype = getattr(torch, dtype_name)
    inputs = torch.randn((world, world, *shape), generator=torch.Generator().manual_seed(0)).to(dtype)
    found = wait(exchange_by_messages(inputs[rank].flatten(0, 1), world, group))
    assert torch.equal(found, inputs[:, rank].flatten(0, 1))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 3), "float32"), ((1,), "bfloat16"), ((2, 3, 5), "float16"), ((0, 3), "float32"), ((3,), "int64")],
)
@pytest.mark.parametrize("world", [2, 3])
def test_parts_arrive_in_rank_order(ranks, world, shape, dtype):
    ranks(world).run(_exchange, shape, dtype)


def _transposed() -> None:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    inputs = torch.arange(world * 3 * 2 * world).view(world, 3, 2 * world)
    found = wait(exchange_by_messages(inputs[rank].t(), world, group))
    assert torch.equal(found, torch.cat([part.t().chunk(world)[rank] for part in inputs]))


@pytest.mark.distributed
def test_an_input_of_other_strides(ranks):
    ranks(2).run(_transposed)


def test_opcheck_of_several(one_rank):
    inputs = [torch.randn(4, 3), torch.randn(0, 2), torch.randn(3, 5).t()]
    torch.library.opcheck(coalesced.default, (inputs, 1, dist.group.WORLD.group_name))


def _exchange_several() -> None:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (1,), (0, 2), (2, 3, 5))
    parts = [torch.randn((world, world, *shape), generator=generator) for shape in shapes]
    turned = torch.arange(world * 3 * 2 * world).view(world, 3, 2 * world)
    found = coalesced([*(part[rank].flatten(0, 1) for part in parts), turned[rank].t()], world, group)
    assert torch.equal(wait(found[-1]), torch.cat([part.t().chunk(world)[rank] for part in turned]))
    for arriving, part in zip(found, parts, strict=False):
        assert torch.equal(wait(arriving), part[:, rank].flatten(0, 1))


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_several_arrive_each_by_itself(ranks, world):
    ranks(world).run(_exchange_several)

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dsgraph.inductor_ext  # noqa: F401  # registers the ops

pytestmark = pytest.mark.distributed


def _gather_and_reduce(full_rows: int, dtype_name: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    full = torch.randn(full_rows, 3)
    chunks = full.chunk(world)
    shard = (chunks[rank] if rank < len(chunks) else full[:0]).clone().requires_grad_()
    how = {"dtype": dtype, "reduce_dtype": torch.float32, "outer_groups": []}
    gathered = torch.ops.dsgraph.gather_param(shard, None, full.shape, group=group, **how)
    assert torch.equal(gathered, full.to(dtype))
    (gathered * (rank + 1)).sum().backward()
    expected = (1 + world) / 2
    torch.testing.assert_close(shard.grad, torch.full_like(shard, expected))

    whole = torch.randn(full_rows, 3).requires_grad_()
    handed = torch.ops.dsgraph.gather_param(whole, None, full.shape, group="", **(how | {"outer_groups": [group]}))
    (handed * (rank + 1)).sum().backward()
    torch.testing.assert_close(whole.grad, torch.full_like(whole, expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [6, 7, 1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_gathers_and_averages(ranks, world, rows, dtype):
    ranks(world).run(_gather_and_reduce, rows, dtype)

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from dsgraph.inductor_ext import REDUCTIONS, chunk_rows, pad_rows

gather_param = torch.ops.dsgraph.gather_param
reduce_grad = torch.ops.dsgraph.reduce_grad


def _options(group, outer, dtype=torch.float32):
    return {"dtype": dtype, "reduce_dtype": torch.float32, "group": group, "outer_groups": outer}


@pytest.fixture
def group(one_rank):
    return dist.group.WORLD.group_name


@pytest.mark.parametrize(("sharded", "kept"), list(itertools.product((True, False), (True, False))))
def test_opcheck(group, sharded, kept):
    how = _options(group if sharded else "", [] if sharded else [group])
    shard = torch.randn(4, 3, requires_grad=True)
    gathered_copy = torch.randn(4, 3) if kept else None
    torch.library.opcheck(gather_param.default, (shard, gathered_copy, [4, 3]), how)
    torch.library.opcheck(reduce_grad.default, (torch.randn(4, 3), [4, 3]), how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_gradient_comes_back_in_the_master_dtype(group, dtype):
    shard = torch.randn(4, 3, requires_grad=True)
    full = gather_param(shard, None, [4, 3], **_options(group, [], dtype))
    assert full.dtype is dtype
    assert torch.equal(full, shard.to(dtype))
    (full * 2).sum().backward()
    assert shard.grad.dtype is torch.float32
    assert torch.equal(shard.grad, torch.full((4, 3), 2.0))


def test_the_copy_is_handed_out_and_the_shard_gets_the_gradient(group):
    shard, gathered_copy = torch.zeros(4, 3, requires_grad=True), torch.randn(4, 3)
    full = gather_param(shard, gathered_copy, [4, 3], **_options(group, []))
    assert torch.equal(full, gathered_copy)
    full.sum().backward()
    assert torch.equal(shard.grad, torch.ones(4, 3))


@pytest.mark.parametrize("shape", ([4, 3], []))
def test_a_marker_names_its_reduction(group, monkeypatch, shape):
    def add_up(grad, shard_shape, kept, accumulated_grad, **options):
        assert list(shard_shape) == shape and options["group"] == ""
        return accumulated_grad + grad, [kept[0] + grad, None]

    monkeypatch.setitem(REDUCTIONS, "add up", add_up)
    shard, total, other = (torch.ones(shape, requires_grad=needed) for needed in (True, True, False))
    how = _options("", [group]) | {"reduction": "add up", "adds_sum": True}
    full = gather_param(shard, None, shape, torch.full(shape, 5.0), [total, other], **how)
    (full * 3).sum().backward()
    assert torch.equal(shard.grad, torch.full(shape, 8.0)) and torch.equal(total.grad, torch.full(shape, 4.0))


def test_results_are_new_tensors(group):
    shard = torch.randn(4, 3)
    for how in (_options(group, []), _options("", [group])):
        gather_param(shard, None, [4, 3], **how).zero_()
        reduce_grad(shard, [4, 3], **how).zero_()
        assert shard.abs().sum() > 0


@pytest.mark.parametrize(("rows", "world", "expected"), [(8, 2, 4), (5, 2, 3), (1, 3, 1), (0, 3, 0), (7, 8, 1)])
def test_chunk_rows_follows_torch_chunk(rows, world, expected):
    assert chunk_rows(rows, world) == expected
    if rows:
        assert max(piece.shape[0] for piece in torch.empty(rows, 2).chunk(world)) == expected


def test_pad_rows():
    x = torch.ones(2, 3)
    assert pad_rows(x, 2) is x
    assert torch.equal(pad_rows(x, 4), torch.cat([x, torch.zeros(2, 3)]))
    assert pad_rows(torch.ones(3, 2).t(), 2).is_contiguous()

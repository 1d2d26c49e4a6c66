"""Slices through views: heads that are merged with the batch, fused heads, complex numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import FileCheck

from dsgraph.passes.parallel.slice_tensors import SliceTensors
from dsgraph.passes.parallel.slices import Refusal, Slice, through_reshape
from tests.passes.parallel.capturing import capture, marked
from tests.passes.tracing import code, run_pass


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize(
    ("before", "held", "after", "found"),
    [
        ((2, 8, 12), Slice(2), (2, 8, 4, 3), Slice(2)),
        ((2, 4, 8, 3), Slice(1), (8, 8, 3), Slice(0, 2)),
        ((8, 8, 3), Slice(0, 2), (2, 4, 8, 3), Slice(1)),
        ((2, 1, 8, 12), Slice(3), (2, 8, 4, 3), Slice(2)),
        ((2, 8, 12), Slice(2), (2, 1, 8, 12), Slice(3)),
        ((5, 3, 4), Slice(1, 3), (15, 4), Refusal),
        ((3, 12), Slice(1), (9, 4), Refusal),
    ],
)
def test_a_reshape_moves_the_slice(before, held, after, found):
    result = through_reshape(before, after, held, 2)
    assert isinstance(result, Refusal) if found is Refusal else result == found


def test_the_slice_after_a_reshape_is_that_of_each_rank():
    from dsgraph.inductor_ext import slice_of

    full = torch.arange(2 * 4 * 3).view(2, 4, 3)
    held = through_reshape((2, 4, 3), (8, 3), Slice(1), 2)
    for rank in (0, 1):
        own = slice_of(full, 1, parts=1, ranks=2, rank=rank).reshape(4, 3)
        assert torch.equal(own, slice_of(full.view(8, 3), held.dim, parts=held.parts, ranks=2, rank=rank))


def test_attention_of_bloom_gathers_nothing():
    def attend(x: Tensor, alibi: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
        heads = F.linear(x, marked(qkv, 0)).view(2, 5, 4, 3, 2)
        q, k, v = (heads[..., number, :].transpose(1, 2).reshape(8, 5, 2) for number in range(3))
        scores = alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.5)
        found = torch.bmm(scores.view(2, 4, 5, 5).softmax(-1).view(8, 5, 5), v)
        return F.linear(found.view(2, 4, 5, 2).permute(0, 2, 1, 3).reshape(2, 5, 8), marked(out, 1))

    gm = capture(attend, _leaf(2, 5, 8), torch.randn(8, 1, 5), _leaf(12, 8), _leaf(8, 4))
    assert run_pass(SliceTensors(), gm).notes == ()
    FileCheck().check("own_slice.default(l_alibi_, 0, 2, 2").check("baddbmm").check("sum_slices").run(code(gm))


def test_groups_of_queries_with_their_key_and_value_are_shared():
    def attend(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
        heads = F.linear(x, marked(qkv, 0)).view(2, 5, 2, 4, 2)  # two groups: two queries, key, value
        q, k = heads[:, :, :, :-2], heads[:, :, :, [-2]]
        return F.linear((q * torch.broadcast_to(k, q.shape)).flatten(2, 4), marked(out, 1))

    gm = capture(attend, _leaf(2, 5, 8), _leaf(8, 8), _leaf(8, 4))
    assert run_pass(SliceTensors(), gm).notes == ()
    FileCheck().check("broadcast_to").check("(2, 5, 1, 2, 2)").check("sum_slices").run(code(gm))


def test_heads_as_complex_numbers_stay_sliced():
    def turn(x: Tensor, weight: Tensor, angles: Tensor, out: Tensor) -> Tensor:
        h = torch.view_as_complex(F.linear(x, marked(weight, 0)).view(3, 4, 1, 2)) * angles
        return F.linear(torch.view_as_real(h).flatten(1), marked(out, 1))

    gm = capture(turn, _leaf(3, 8), _leaf(4, 8), torch.randn(1, dtype=torch.complex64), _leaf(8, 4))
    assert run_pass(SliceTensors(), gm).notes == ()


def test_an_index_takes_equal_pieces_and_nothing_else():
    def fused(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
        y = F.linear(x, marked(qkv, 0, 3))
        return F.linear(y[..., :4] * y[:, 4:8] + y[:, 8:], marked(out, 1))

    gm = capture(fused, _leaf(3, 8), _leaf(6, 8), _leaf(8, 2))
    assert run_pass(SliceTensors(), gm).notes == ()
    FileCheck().check("slice(0, 2, None)").check("slice(2, 4, None)").check("slice(4, 6, None)").run(code(gm))
    gm = capture(lambda x, w: F.linear(x, marked(w, 0, 3))[:, 2:6], _leaf(3, 8), _leaf(6, 8))
    assert run_pass(SliceTensors(), gm).notes == ("linear is gathered for getitem: an index into its slices",)

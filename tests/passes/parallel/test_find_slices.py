"""Finding pairs of products on captured graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsgraph.passes.parallel.find_slices import FoundSlices, find_slices
from dsgraph.passes.parallel.slices import Slice
from tests.passes.parallel.capturing import capture, named


def _find(function, *weights: Tensor, given=None, ranks: int = 2) -> FoundSlices:
    gm = capture(function, torch.randn(3, 8), *weights)
    names = {number + 1: f"layers.0.w{number}" for number in range(len(weights))}
    return find_slices(gm, named(gm, names), ranks=ranks, given=given)


def test_a_pair_is_a_column_and_a_row():
    found = _find(lambda x, up, down: F.linear(F.silu(F.linear(x, up)), down).mean(-1), *_pair())
    assert found == FoundSlices({"layers.0.w0": Slice(0), "layers.0.w1": Slice(1)})


def test_a_product_that_is_normalised_stays_whole():
    found = _find(lambda x, up: F.layer_norm(F.linear(x, up), (12,)), torch.randn(12, 8))
    assert found == FoundSlices({}, {"layers.0.w0": "layer_norm along the sharded dimension"})


def test_three_heads_are_not_shared_by_two_ranks():
    def heads(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = F.linear(x, up).view(3, 3, 4)
        return F.linear((h @ h.transpose(1, 2) @ h).flatten(1), down).mean(-1)

    found = _find(heads, *_pair())
    assert not found.slices and "3 heads, which 2 ranks" in found.whole["layers.0.w0"]


def test_products_spelled_as_matmul_are_a_column_and_a_row():
    found = _find(lambda x, up, down: (x.abs() @ up.T).relu() @ down.t(), *_pair())
    assert found.slices == {"layers.0.w0": Slice(0), "layers.0.w1": Slice(1)}


def test_fused_products_are_sliced_piece_by_piece():
    def fused(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        one, two, three = F.linear(x, up).split(4, -1)
        return F.linear(one * two + three, down).mean(-1)

    found = _find(fused, torch.randn(12, 8), torch.randn(8, 4))
    assert found.slices == {"layers.0.w0": Slice(0, 3), "layers.0.w1": Slice(1)}


def test_what_does_not_divide_and_what_is_read_twice_stay_whole():
    odd = _find(lambda x, up: F.linear(x, up), torch.randn(5, 8))
    assert "5 cannot be divided by 2" in odd.whole["layers.0.w0"]
    twice = _find(lambda x, up: F.linear(x, up) + up.sum(-1), torch.randn(12, 8))
    assert twice.whole["layers.0.w0"] == "sum reads it as well"


def test_a_given_plan_is_kept_and_its_pieces_are_found():
    def fused(x: Tensor, up: Tensor) -> Tensor:
        one, other = F.linear(x, up).chunk(2, -1)
        return one * other

    found = _find(fused, torch.randn(12, 8), given={"layers.0.w0": Slice(0)})
    assert found.slices == {"layers.0.w0": Slice(0, 2)} and not found.whole


def _pair() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 8), torch.randn(8, 12)


def test_a_vocabulary_is_sliced_with_the_output_layer_that_shares_it():
    def model(ids: Tensor, table: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(F.embedding(ids, table), table), ids)

    for rows, slices in ((8192, {"w": Slice(0)}), (64, {})):
        gm = capture(model, torch.zeros(3, dtype=torch.int64), torch.randn(rows, 4))
        assert find_slices(gm, named(gm, {1: "w"}), ranks=2).slices == slices

"""Products with fused weights, of which each piece gets a product of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import FileCheck

from dsgraph.passes.parallel.slice_tensors import SliceTensors
from dsgraph.passes.parallel.slice_walk import Sliced
from dsgraph.passes.parallel.unfuse_products import unfuse_products
from tests.passes.parallel.capturing import capture, marked
from tests.passes.tracing import code, run_pass


def _by_index(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = F.linear(x, w, b)
    return y[..., :8], y[:, 8:12], y[..., 12:]


def _by_split(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, w, b).split((8, 4, 4), dim=-1)


def _by_heads(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = (x.abs() @ w.T).view(3, 4, 4)
    return y[..., :-2, :], y[..., [-2], :], y[:, [-1]]


@pytest.mark.parametrize("fused", [_by_index, _by_split, _by_heads])
def test_each_piece_has_a_product_of_its_own_and_the_values_stay(fused):
    inputs = torch.randn(3, 6), torch.randn(16, 6), torch.randn(16)
    gm = capture(fused, *inputs)
    (weight,) = (node for node in gm.graph.find_nodes(op="placeholder") if "w" in node.name)
    pieces = unfuse_products(gm, {weight: None}, Sliced(2))
    assert [(piece.dim, piece.first, piece.last) for piece in pieces] == [(0, 0, 8), (0, 8, 12), (0, 12, 16)]
    gm.graph.lint()
    gm.recompile()
    by_name = dict(zip("xwb", inputs, strict=True))
    values = [by_name[node.name.strip("l_")] for node in gm.graph.find_nodes(op="placeholder")]
    for mine, theirs in zip(gm(*values), fused(*inputs), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert unfuse_products(gm, {weight: None}, Sliced(2)) == []


@pytest.mark.parametrize(
    "left",
    [
        lambda x, w: F.linear(x, w).split(8, -1),  # equal pieces
        lambda x, w: (F.linear(x, w)[:, :12], F.linear(x, w)[:, 12:]),  # two products
        lambda x, w: (lambda y: (y[:, :12], y[:, 12:], y.sum()))(F.linear(x, w)),  # read as a whole
        lambda x, w: (lambda y: (y[:2, :12], y[:, 12:]))(F.linear(x, w)),  # of some rows
        lambda x, w: (lambda y: (y[:, :12:2], y[:, 12:]))(F.linear(x, w)),  # every second
    ],
)
def test_what_is_left_alone(left):
    gm = capture(left, torch.randn(3, 6), torch.randn(16, 6))
    before = code(gm)
    (weight,) = (node for node in gm.graph.find_nodes(op="placeholder") if "w" in node.name)
    assert unfuse_products(gm, {weight: None}, Sliced(2)) == [] and code(gm) == before


def _attend(dim: int) -> Callable[..., Tensor]:
    def attend(x: Tensor, fused: Tensor, out: Tensor) -> Tensor:
        y = F.linear(x, marked(fused, dim))  # four heads of queries, two of keys, width 2
        q, k = y[..., :8].view(3, 4, 2), y[..., 8:].view(3, 2, 2)
        k = k[:, :, None].expand(3, 2, 2, 2).reshape(3, 4, 2)
        return F.linear((q * k).flatten(1), marked(out, 1))

    return attend


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_a_fused_weight_is_gathered_and_each_rank_computes_its_heads():
    gm = capture(_attend(0), _leaf(3, 8), _leaf(6, 8), _leaf(8, 4))
    (note,) = run_pass(SliceTensors(), gm).notes
    assert "index into its slices" in note
    FileCheck().check("gather_slices").check("own_slice").check("(3, 2, 2)").check("own_slice").check(
        "(3, 1, 2)"
    ).check("sum_slices").check_not("gather_slices").run(code(gm))
    assert run_pass(SliceTensors(), gm).changed == 0


def test_a_fused_weight_that_is_sliced_by_rows_stays_fused():
    gm = capture(_attend(1), _leaf(3, 8), _leaf(12, 4), _leaf(8, 4))
    run_pass(SliceTensors(), gm)
    FileCheck().check("own_slice").check("linear").check("sum_slices").check("getitem").run(code(gm))
    assert code(gm).count("linear(") == 2

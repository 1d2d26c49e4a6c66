"""Slices of values that a graph writes to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import FileCheck

from dsgraph.passes.parallel.find_slices import find_slices
from dsgraph.passes.parallel.slice_tensors import SliceTensors
from dsgraph.passes.parallel.slices import Slice
from tests.passes.parallel.capturing import capture, marked, named
from tests.passes.tracing import code, run_pass


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _fill(*, early: bool = False) -> Callable[..., Tensor]:
    def keys(x: Tensor, shared: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        h = F.linear(x, marked(weight, 0)).view(3, 4, 2)
        shared = shared.expand(-1, 4, -1)
        full = h.new_empty(3, 4, 3)
        full[..., :2].copy_(h)
        seen = full.sum(-1).mean() if early else 0
        full[..., 2:].copy_(shared)
        return F.linear(full.flatten(1), marked(out, 1)) + seen

    return keys


def test_a_new_tensor_is_filled_by_slices():
    gm = capture(_fill(), _leaf(3, 8), _leaf(3, 1, 1), _leaf(4, 8), _leaf(8, 6))
    assert run_pass(SliceTensors(), gm).notes == ()
    FileCheck().check("new_empty([3, 2, 3])").check("copy_").check("own_slice").check("copy_").check("sum_slices").run(
        code(gm)
    )


def test_a_copy_that_is_sharded_in_another_way_is_to_blame():
    def keys(x: Tensor, weight: Tensor, shared: Tensor, out: Tensor) -> Tensor:
        h, s = F.linear(x.abs(), weight).view(3, 4, 2), F.linear(x, shared).view(3, 1, 4).expand(3, 4, 4)
        full = h.new_empty(3, 4, 6)
        full[..., :2].copy_(h)
        full[..., 2:].copy_(s)
        return F.linear(full.flatten(1), out)

    gm = capture(keys, _leaf(3, 8), _leaf(8, 8), _leaf(4, 8), _leaf(8, 24))
    found = find_slices(gm, named(gm, {1: "heads", 2: "shared", 3: "out"}), ranks=2)
    assert found.slices == {"heads": Slice(0), "out": Slice(1)} and found.whole == {"shared": "copy_ writes to it"}


def test_a_new_tensor_that_is_read_before_it_is_filled_stays_replicated():
    gm = capture(_fill(early=True), _leaf(3, 8), _leaf(3, 1, 1), _leaf(4, 8), _leaf(8, 6))
    assert any("copy_ writes to it" in note for note in run_pass(SliceTensors(), gm).notes)
    FileCheck().check("gather_slices").check("new_empty(3, 4, 3)").run(code(gm))


@pytest.mark.parametrize("write", [lambda h: h[:, 0].fill_(0), lambda h: h.view(3, 4, 3)[..., 0].zero_()])
def test_values_that_are_written_through_views_are_replicated_before(write):
    def written(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        h = F.linear(x, marked(weight, 0)).relu()
        write(h)
        return F.linear(h, marked(out, 1))

    gm = capture(written, torch.randn(3, 8), torch.randn(6, 8), torch.randn(8, 6))
    run_pass(SliceTensors(), gm)
    FileCheck().check("gather_slices").check("relu").check_regex("fill_|zero_").check("own_slice").run(code(gm))

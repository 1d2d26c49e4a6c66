"""The forms of a reduction among which `ChooseCollectiveAlgorithms` chooses, on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dsgraph.passes import CostModel, MeshAxis
from dsgraph.passes.analysis.hardware import DEVICES, Link, LinkTable
from dsgraph.passes.ir.collectives import collective_kind, collectives
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.passes.tracing import reduce, run_pass, trace

pytestmark = pytest.mark.distributed

FORMS = ("exchange_by_messages", "all_to_all_single", "reduce_scatter_tensor")


def _run_all_forms(dtype: torch.dtype) -> tuple[list[str], list[torch.Tensor]]:
    """The kinds that were chosen when each was said to be fastest, and the sums that came of them."""
    group, world = dist.group.WORLD.group_name, dist.get_world_size()
    axis = MeshAxis("shard", world, group, "gloo")
    torch.manual_seed(dist.get_rank())
    # Of all sizes, so that another order of adding shows.
    grads = [torch.randn(3 * world, 17) * 10.0 ** torch.randint(-3, 4, (3 * world, 17)) for _ in range(3)]
    how = {"group": group, "dtype": dtype, "reduce_dtype": dtype}
    kinds, outputs = [], []
    for form in FORMS:
        table = LinkTable(Link(9.0, 1.0), tuple((kind, Link(1e-3 if kind == form else 1.0, 1e9)) for kind in FORMS))
        gm = trace(lambda *grads: tuple(reduce(grad.to(dtype), (3, 17), **how) for grad in grads), *grads)
        run_pass(InsertZeroCollectives(), gm, axis)
        run_pass(ChooseCollectiveAlgorithms(), gm, axis, costs=CostModel(DEVICES["cpu"], (axis,), {group: table}))
        kinds += sorted({collective_kind(started) for started in collectives(gm)})
        outputs.append(torch.cat(gm(*grads)))
    return kinds, outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_get_the_same_bits_by_every_form(ranks, dtype):
    for kinds, (first, *others) in ranks(2).run(_run_all_forms, dtype):
        assert kinds == list(FORMS)
        assert all(torch.equal(first, other) for other in others)


def test_three_ranks_get_the_same_bits_by_the_forms_that_are_chosen(ranks):
    for kinds, (first, *others) in ranks(3).run(_run_all_forms, torch.float32):
        assert kinds == ["exchange_by_messages", "all_to_all_single", "exchange_by_messages"]
        assert all(torch.equal(first, other) for other in others)

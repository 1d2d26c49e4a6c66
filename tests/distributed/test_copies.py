"""Gathered copies of stages 1 and 2 are on their way while the forward computes, and nothing reads them too early.

Over the loopback device everything arrives at once. So the first rank comes late, until when the others lack its rows:
whoever does not wait for them computes with those of the step before.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph
from dsgraph.compat.process_groups import default_store
from tests.distributed.training import compare, full
from tests.models import CASES, build, features

pytestmark = pytest.mark.distributed

LATE_S = 0.3


def _late(batches: Callable[[int, int], tuple[Tensor, ...]], step: int, rank: int) -> tuple[Tensor, ...]:
    if dist.get_rank() == 0:
        time.sleep(LATE_S)
    return batches(step, rank)


def _compare(case: str, **how: object) -> None:
    compare(CASES[case].build, partial(_late, CASES[case].batches), **how)  # type: ignore[arg-type]


@pytest.mark.covering(1)
@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize("stage", (1, 2))
@pytest.mark.parametrize("case", ("gpt", "graph_break", "uneven"))
def test_a_late_rank_is_waited_for(ranks, case, stage, codegen):
    exact = case == "gpt"
    ranks(2).run(_compare, case, stage=stage, codegen=codegen, steps=2, exact=exact, evaluate=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize(("stage", "reduce_once"), ((1, None), (2, None), (2, True)))
def test_a_late_rank_is_waited_for_under_accumulation(ranks, stage, reduce_once, codegen):
    how = {"codegen": codegen, "steps": 2, "micro_batches": 2, "reduce_once": reduce_once}
    ranks(2).run(_compare, "uneven", stage=stage, **how)


@pytest.mark.full
@pytest.mark.inductor
def test_inductor_waits_for_a_late_rank(ranks):
    ranks(2).run(_compare, "uneven", stage=2, codegen="inductor", steps=2, micro_batches=2, reduce_once=True)


def _compare_without_waits(pipeline: object) -> None:
    _compare("gpt", stage=1, steps=2, pipeline=pipeline)


def test_a_pipeline_without_waits_finds_copies_that_have_arrived(ranks):
    ranks(2).run(_compare_without_waits, dsgraph.default_pipeline().without("await_copies"))


@torch.library.custom_op("dsgraph_tests::announce", mutates_args=())
def announce(x: Tensor) -> Tensor:
    """Says that this rank computes."""
    default_store().set(f"rank {dist.get_rank()} computes", "yes")
    return x.clone()


announce.register_fake(torch.empty_like)
announce.register_autograd(lambda ctx, grad: grad)


class Announcing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.unused = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.ops.dsgraph_tests.announce(x.sin()))


def _compute_first(codegen: str | None) -> None:
    """The first rank does not gather at all before the other computes: had that to wait, both would for ever."""
    rank, store = dist.get_rank(), default_store()
    torch.manual_seed(0)
    alone = Announcing()
    model = dsgraph.partition(copy.deepcopy(alone), stage=2, keep_whole_below=0)
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    x, _ = features(0, rank)
    for _ in range(6):  # compiles, together; and until ranks know what follows what, they wait for each other
        runs(x)
        with torch.no_grad():
            for param in (*model.parameters(), *alone.parameters()):
                param.mul_(1.5)
    dist.barrier()
    store.delete_key("rank 1 computes")
    dist.barrier()
    if rank == 0:
        store.wait(["rank 1 computes"])
    torch.testing.assert_close(runs(x), alone(x))


@pytest.mark.parametrize(
    "codegen", (None, "eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.full]))
)
def test_the_forward_begins_before_copies_have_arrived(ranks, codegen):
    ranks(2).run(_compute_first, codegen)


def _leave_under_way(codegen: str | None) -> None:
    """A gathered copy that no graph reads: others, updates, copies and eager reads must not mind it."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    alone = Announcing()
    model = dsgraph.partition(copy.deepcopy(alone), stage=1, keep_whole_below=0)
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    state, (x, _) = model._dsgraph.partition, features(0, rank)

    def forward() -> None:
        if rank == 0:
            time.sleep(LATE_S)
        with torch.no_grad():
            assert torch.equal(runs(x), alone(x))

    def update() -> None:
        with torch.no_grad():
            for param in (*model.parameters(), *alone.parameters()):
                param.mul_(2.0)

    forward()
    assert state.copies.under_way
    update()  # while the rows of the values before are being sent
    forward()
    assert torch.equal(model.unused.weight, alone.unused.weight)
    update()
    forward()
    copied = copy.deepcopy(model)
    assert not state.copies.under_way and not copied._dsgraph.partition.copies.under_way
    assert torch.equal(copied.unused.weight, alone.unused.weight)
    update()
    model.linear.weight  # noqa: B018  # an eager read refreshes all
    if rank == 0:
        time.sleep(LATE_S)
    runs(x).sum().backward()
    assert not state.copies.under_way, "a backward finds nothing under way"
    assert torch.equal(model.unused.weight, alone.unused.weight)


@pytest.mark.parametrize("codegen", (None, "eager"))
def test_copies_that_no_graph_reads(ranks, codegen):
    ranks(2).run(_leave_under_way, codegen)


def _train_two_graphs() -> None:
    """Layers that are compiled each for itself, of which the first starts the gathers of all."""
    rank = dist.get_rank()
    model = dsgraph.partition(build("gpt"), stage=2, keep_whole_below=0)
    for module in (model.blocks[0], model.head):
        module.compile(backend="dsgraph", options={"codegen": "eager"})
    alone = build("gpt")
    optimizers = [torch.optim.SGD(it.parameters(), lr=0.5) for it in (model, alone)]
    for step in range(2):
        batches = [CASES["gpt"].batches(step, other) for other in range(dist.get_world_size())]
        expected = sum(alone(*batch) for batch in batches) / len(batches)
        expected.backward()
        if rank == 0:
            time.sleep(LATE_S)
        model(*batches[rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(mine), theirs, rtol=1e-5, atol=1e-6)


def test_several_graphs_share_a_refresh(ranks):
    ranks(2).run(_train_two_graphs)


def _average(stage: int, codegen: str | None) -> None:
    """A moving average of a model: never trained, evaluated, and written to through `.data`."""
    average, alone = dsgraph.partition(build("uneven"), stage=stage, keep_whole_below=0), build("uneven")
    runs = torch.compile(average, backend="dsgraph", options={"codegen": codegen}) if codegen else average
    batch = CASES["uneven"].batches(0, 0)
    for bound in (1.0, 0.1, 0.01):  # of few rows, so that some ranks write nothing new
        for mine, theirs in zip(average.parameters(), alone.parameters(), strict=True):
            mine.data.clamp_(max=bound)
            theirs.data.clamp_(max=bound)
        with torch.no_grad():
            torch.testing.assert_close(runs(*batch), alone(*batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stage", "codegen"), ((1, "eager"), (2, None)))
def test_writes_without_a_trace_to_a_model_that_is_not_trained(ranks, stage, codegen):
    ranks(2).run(_average, stage, codegen)

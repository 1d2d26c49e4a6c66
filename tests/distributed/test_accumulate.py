"""What a step with several micro-batches sends."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import dsgraph
from tests.distributed.training import compare, full
from tests.models import CASES, build, tokens
from tests.pipelines import without_buckets

pytestmark = pytest.mark.distributed

MATRICES = 2 + 4  # of the one-layer GPT: embedding, head, qkv, out, up, down
MICRO_BATCHES = 4


def _collectives(profile) -> dict[str, int]:
    """Collectives that ran, by kind, wherever they were called from; messages that are no exchange are a gather's."""
    counts: Counter[str] = Counter()
    for event in profile.events():
        if event.name.startswith("_c10d_functional::") and "wait" not in event.name:
            counts[event.name.split("::")[1].removesuffix("_out")] += 1
        elif event.name == "c10d::send":
            counts["message"] += 1
        elif event.name == "dsgraph::exchange_by_messages":
            counts["exchange"] += 1
    messages, others = counts.pop("message", 0), dist.get_world_size() - 1
    assert messages % others == 0
    counts["all_gather_into_tensor"] += messages // others - counts["exchange"]
    return dict(counts)


def _count(stage: int, codegen: str | None) -> dict[str, int]:
    """Collectives of the second step of four micro-batches."""
    rank = dist.get_rank()
    model = dsgraph.partition(build("gpt"), stage=stage, keep_whole_below=20)
    options = {"codegen": codegen, "pipeline": without_buckets()}
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for micro in range(MICRO_BATCHES):
                waiting = dsgraph.accumulate(model) if micro < MICRO_BATCHES - 1 else nullcontext()
                with waiting:
                    runs(*tokens(MICRO_BATCHES * step + micro, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _collectives(profile)


@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_collectives_of_a_step(ranks, stage, codegen):
    counts = ranks(2).run(_count, stage, codegen)[0]
    gathers = counts.get("all_gather_into_tensor", 0)
    scatters = counts.get("reduce_scatter_tensor", 0) + counts.get("exchange", 0)
    reductions = counts.get("all_reduce", 0)
    if stage == 0:
        # Local gradients are reduced once: all whole parameters in one bucket, and which of them were used.
        assert (gathers, scatters, reductions) == (0, 0, 2)
    elif stage == 1:
        assert (gathers, scatters, reductions) == (MATRICES, MATRICES, 2)
    elif stage == 2:
        assert (gathers, scatters) == (MATRICES, MATRICES * MICRO_BATCHES)
    else:
        assert scatters == MATRICES * MICRO_BATCHES
        assert gathers == (MATRICES if codegen is None else 2 * MATRICES - 2) * MICRO_BATCHES


@pytest.mark.parametrize("stage", (0, 1))
def test_low_precision_sums_are_kept_in_the_master_dtype(ranks, stage):
    ranks(2).run(_sum_of_many, stage)


def _sum_of_many(stage: int) -> None:
    """Seventeen equal bf16 gradients: added up in bf16 the last ones would be lost."""

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return (self.weight * x).float().sum()

    model = dsgraph.partition(Scale(), stage=stage, keep_whole_below=0, param_dtype=torch.bfloat16)
    summands = [256.0] + [1.0] * 16
    for number, summand in enumerate(summands):
        with dsgraph.accumulate(model) if number < len(summands) - 1 else nullcontext():
            model(torch.full((4, 4), summand, dtype=torch.bfloat16)).backward()
    grad = full(next(model.parameters()).grad)
    assert grad.dtype is torch.float32
    assert torch.equal(grad, torch.full((4, 4), 272.0)), grad


def _unused_on_one_rank() -> None:
    """A parameter that only one rank uses is averaged with zeros; one that nobody uses keeps no gradient."""
    rank = dist.get_rank()
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(3))
    model = dsgraph.partition(layers, stage=1, keep_whole_below=0)
    x = torch.ones(1, 2)
    with dsgraph.accumulate(model):
        model[0](x).sum().backward()
    (model[0](x).sum() + (model[1](x).sum() if rank == 0 else 0)).backward()
    grads = [next(layer.parameters()).grad for layer in model]
    assert torch.equal(full(grads[0]), torch.full((2, 2), 2.0))
    assert torch.equal(full(grads[1]), torch.full((2, 2), 0.5))
    assert grads[2] is None


def test_unused_parameters(ranks):
    ranks(2).run(_unused_on_one_rank)


def _compare_tied(stage: int) -> None:
    compare(CASES["tied"].build, CASES["tied"].batches, stage=stage, codegen=None, micro_batches=3)


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_uncompiled_accumulation_matches_one_process(ranks, stage):
    ranks(2).run(_compare_tied, stage)


def _two_forwards_a_backward(stage: int) -> None:
    rank = dist.get_rank()
    model, alone = dsgraph.partition(build("gpt"), stage=stage, keep_whole_below=20), build("gpt")
    with dsgraph.accumulate(model):
        (model(*tokens(0, rank)) + model(*tokens(1, rank))).backward()
    (model(*tokens(2, rank)) * model(*tokens(3, rank))).backward()
    (alone(*tokens(0, rank)) + alone(*tokens(1, rank))).backward()
    (alone(*tokens(2, rank)) * alone(*tokens(3, rank))).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        torch.testing.assert_close(full(mine.grad), theirs.grad / dist.get_world_size(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_no_local_gradient_counts_twice(ranks, stage):
    ranks(2).run(_two_forwards_a_backward, stage)

"""Ranks that are about to part ways raise together, within seconds, and say where they differ."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsgraph
from dsgraph.passes.ir.collectives import collectives
from tests.models import build, tokens
from tests.pipelines import without_buckets

pytestmark = pytest.mark.distributed

EAGER = {"codegen": "eager"}


def _message(function: Any, *args: Any) -> tuple[str, float]:
    started = time.perf_counter()
    try:
        function(*args)
    except Exception as error:
        return str(error), time.perf_counter() - started
    return "", time.perf_counter() - started


def _partition_different_models() -> tuple[str, float]:
    width = 8 + dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width))
    answer = _message(lambda: dsgraph.partition(model, keep_whole_below=0))
    assert type(model[0].weight) is nn.Parameter, "nothing was changed"
    return answer


def _partition_with_different_options() -> tuple[str, float]:
    return _message(lambda: dsgraph.partition(nn.Linear(4, 4), stage=2 + dist.get_rank()))


def _compile_different_graphs() -> tuple[str, float]:
    class Chooses(nn.Module):
        """Each rank uses another layer second."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6)

        def forward(self, x):
            return (self.b(self.a(x)) if dist.get_rank() == 0 else self.c(self.a(x))).sum()

    model = dsgraph.partition(Chooses(), keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options=EAGER)
    return _message(compiled, torch.randn(2, 4))


def _compile_with_different_pipelines() -> tuple[str, float]:
    pipeline = dsgraph.default_pipeline()
    if dist.get_rank() == 1:
        pipeline = pipeline.without("bucket_small_reductions")
    model = dsgraph.partition(build("gpt"), keep_whole_below=100)
    return _message(torch.compile(model, backend="dsgraph", options={**EAGER, "pipeline": pipeline}), *tokens(0, 0))


def _reorder_on_one_rank() -> tuple[str, float]:
    @dsgraph.graph_pass(phase="forward", reorders_collectives=True)
    def start_the_last_gather_first(gm: Any, ctx: dsgraph.PassContext) -> int:
        if dist.get_rank() == 0:
            return 0
        first, *_, last = collectives(gm)
        shard = last.all_input_nodes[0]
        first.prepend(shard)
        first.prepend(last)
        return 1

    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]  # of one shape: only the parameters' names tell them apart
    model = dsgraph.partition(nn.Sequential(*layers), keep_whole_below=0)
    pipeline = without_buckets() + [start_the_last_gather_first]
    return _message(torch.compile(model, backend="dsgraph", options={**EAGER, "pipeline": pipeline}), torch.randn(2, 4))


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (
            _partition_different_models,
            [
                "partition different models",
                "entry 3 of 5 and 5",
                "rank 0 has [1.weight: [8, 4]",
                "rank 1 has [1.weight: [9, 4]",
            ],
        ),
        (_partition_with_different_options, ["entry 0", "stage=2", "stage=3"]),
        (
            _compile_different_graphs,
            ["compile different collectives", "rank 0 has [gather_param (4, 4)", "rank 1 has [gather_param (6, 4)"],
        ),
        (_compile_with_different_pipelines, ["rank 0 has [pass bucket_small_reductions], rank 1 has [pass"]),
        (
            _reorder_on_one_rank,
            [
                "run different collectives",
                "gather_by_messages.default [4, 4] torch.float32 over shard of 0.weight], rank 1 has [",
                "They diverge here: rank 0 has [the forward graph after pass start_the_last_gather_first: 3 "
                "collectives",
            ],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_all_ranks_raise_and_name_the_difference(ranks, function, parts):
    for message, seconds in ranks(2).run(function):
        for part in ["ranks 0 and 1", *parts]:
            assert part in message, message
        assert seconds < 30


def _recompile_on_one_rank() -> None:
    """Another batch size on one rank alone changes no collective: nobody has to wait for anybody."""
    rank = dist.get_rank()
    model = dsgraph.partition(build("small"), keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options=EAGER)
    for step in range(3):
        compiled(*tokens(step, rank, batch=2 + rank * step)).backward()


def test_a_recompile_on_one_rank_is_fine(ranks):
    ranks(2).run(_recompile_on_one_rank)


def _come_late(seconds: float) -> tuple[str, float]:
    model = dsgraph.partition(nn.Linear(4, 4), keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options=EAGER)
    if dist.get_rank() == 1:
        time.sleep(seconds)
        return "", 0.0
    return _message(compiled, torch.randn(2, 4))


@pytest.mark.full  # waits for a time-out
def test_a_rank_that_never_comes_is_named_after_the_groups_timeout(ranks):
    with pytest.raises(AssertionError, match=r"ranks \[1\] did not reach it within 5 s"):
        ranks(2).run(_come_late_and_check, timeout_s=5)


def _come_late_and_check() -> None:
    message, seconds = _come_late(8)
    if dist.get_rank() == 0:
        raise RuntimeError(f"{message} ({seconds:.0f} s)")


def _die() -> None:
    model = dsgraph.partition(build("small"), keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options=EAGER)
    compiled(*tokens(0, dist.get_rank())).backward()
    if dist.get_rank() == 1:
        os._exit(13)
    compiled(*tokens(1, dist.get_rank())).backward()


def test_a_rank_that_dies_does_not_leave_the_others_hanging(ranks):
    started = time.perf_counter()
    with pytest.raises(AssertionError, match=r"ranks \[1\] did not answer.*or died"):
        ranks(2).run(_die, timeout_s=10)
    assert time.perf_counter() - started < 60


def _warn() -> list[str]:
    import warnings

    backend = dsgraph.api.new_backend()  # one of its own: the registered one warns once a process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.compile(nn.Linear(4, 4), backend=backend, options=EAGER)(torch.randn(1, 4))
            torch._dynamo.reset()
        torch.compile(nn.Linear(4, 4), backend=backend, options=EAGER).eval()
        model = dsgraph.partition(nn.Linear(4, 4), keep_whole_below=0)
        torch.compile(model, backend=dsgraph.api.new_backend(), options=EAGER)(torch.randn(1, 4))
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        torch.compile(wrapped, backend=dsgraph.api.new_backend(), options=EAGER)(torch.randn(1, 4))
        with torch.no_grad():
            torch.compile(nn.Linear(4, 4), backend=dsgraph.api.new_backend(), options=EAGER)(torch.randn(1, 4))
    return [str(w.message) for w in caught if "averaged" in str(w.message)]


def test_gradients_that_nobody_averages_are_warned_of_once(ranks):
    for messages in ranks(2).run(_warn):
        (message,) = messages
        assert "the gradients of its 2 parameters will not be averaged over the 2 ranks" in message
        assert "dsgraph.partition" in message


def _strict() -> str:
    return _message(
        torch.compile(nn.Linear(4, 4), backend="dsgraph", options={**EAGER, "strict": True}), torch.randn(1, 4)
    )[0]


def test_strict_makes_it_an_error(ranks):
    for message in ranks(2).run(_strict):
        assert "will not be averaged" in message

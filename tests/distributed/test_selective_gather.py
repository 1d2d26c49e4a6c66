"""Parameters that are kept for the backward as memory allows, on ranks whose batches differ in size."""

from __future__ import annotations

import pytest
import torch

import dsgraph
from benchmarks.wire import record_collectives
from tests.distributed.training import compare
from tests.models import CASES, tokens

pytestmark = pytest.mark.distributed


def _uneven_tokens(step: int, rank: int) -> tuple[torch.Tensor, ...]:
    # The second rank's batches are larger, and from the second step on of another length, which it compiles for alone.
    return tokens(step, rank, batch=2 + rank, time=8 + 4 * rank * min(step, 1))


def _compare(limit: int, steps: int) -> None:
    compare(CASES["gpt"].build, _uneven_tokens, stage=3, memory_limit=limit, steps=steps)


def test_ranks_with_other_batches_choose_alike_and_match_one_process(ranks):
    ranks(2).run(_compare, 90_000, steps=1)


@pytest.mark.full
@pytest.mark.parametrize("limit", [85_000, 90_000, 10**9])
def test_so_they_do_where_one_compiles_again(ranks, limit):
    ranks(2).run(_compare, limit, steps=3)


def _gathers(limit: int) -> tuple[tuple[str, ...], int]:
    """Return the kept parameters, and the number of messages in a step."""
    model = dsgraph.partition(CASES["gpt"].build(), stage=3, keep_whole_below=12)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "memory_limit": limit})
    batch = _uneven_tokens(0, torch.distributed.get_rank())
    compiled(*batch).backward()
    calls = record_collectives(lambda: compiled(*batch).backward())
    (only,) = dsgraph.report(compiled).compiles
    return only.activations.kept_names, sum(call.op == "send" for call in calls)


@pytest.mark.full  # ranks with other batches choose alike below
def test_the_rank_with_the_least_memory_to_spare_decides(ranks):
    kept = []
    for limit in (85_000, 110_000, 120_000, 130_000):
        (first, often), (second, _) = ranks(2).run(_gathers, limit)
        assert first == second
        kept.append((len(first), often))
    assert kept == sorted(kept, key=lambda item: (item[0], -item[1])), "more kept, fewer messages"
    assert len(set(kept)) > 2

"""The traffic of a step in the report, against the traffic that is observed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import dsgraph
from benchmarks.wire import record_collectives, sent_bytes
from tests.models import CASES, build

pytestmark = pytest.mark.distributed


def _measure(
    case: str, stage: int, micro_batches: int, *, evaluate: bool = False, reduce_once: bool | None = None
) -> tuple[float, int, int, int]:
    """Bytes sent in the third step, and what the report says: a step, a micro-batch under accumulate, once in it."""
    model = dsgraph.partition(build(case), stage=stage, keep_whole_below=20)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()

    def step() -> None:
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with nullcontext() if is_last else dsgraph.accumulate(model, reduce_once=reduce_once):
                compiled(*CASES[case].batches(micro, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
        if evaluate:
            with torch.no_grad():
                compiled(*CASES[case].batches(0, rank))
            for param in model.parameters():  # what the evaluation gathered is not to count as fresh
                param.to_local().detach().add_(0)
    sent = sent_bytes(record_collectives(step), dist.get_world_size())
    assert sent is not None
    found = dsgraph.report(compiled).step
    return sent, found.sent_bytes, found.accumulated_each_bytes, found.accumulated_once_bytes


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("case", ("gpt", "graph_break", "uneven"))
def test_bytes_of_a_step_are_those_on_the_wire(ranks, case, stage):
    for sent, said, *_ in ranks(2).run(_measure, case, stage, 1):
        assert said == sent > 0


@pytest.mark.parametrize(
    ("stage", "reduce_once"),
    [
        *(pytest.param(stage, None, marks=pytest.mark.full) for stage in (0, 1)),
        pytest.param(2, None, marks=pytest.mark.full),
        pytest.param(2, True, marks=pytest.mark.full),
        (3, None),
    ],
)
def test_bytes_of_an_accumulated_step_are_those_on_the_wire(ranks, stage, reduce_once):
    for sent, _, each, once in ranks(2).run(_measure, "gpt", stage, 3, reduce_once=reduce_once):
        assert 3 * each + once == sent > 0


@pytest.mark.full  # tests/tools/reporting/test_report.py counts forwards without gradients
def test_evaluation_in_between_does_not_count(ranks):
    for sent, said, *_ in ranks(2).run(_measure, "gpt", 3, 1, evaluate=True):
        assert said == sent

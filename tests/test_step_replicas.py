from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import dsgraph
from dsgraph.reporting.report import Report
from dsgraph.state import Freshness
from examples.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=64, width=32, heads=2, layers=2)
MATRICES = 10  # of that model

pytestmark = pytest.mark.usefixtures("fake_ranks")


def _train(
    module: nn.Module, *inputs: torch.Tensor, limit: int | None, micro_batches: int = 3, stage: int = 3
) -> Report:
    """A step of so many micro-batches; the report is from ahead of the last backward."""
    torch._dynamo.reset()  # a model like one before would run its graph
    model = dsgraph.partition(module, stage=stage, keep_whole_below=64)
    options = {"codegen": "eager"} if limit is None else {"codegen": "eager", "memory_limit": limit}
    compiled = torch.compile(model, backend="dsgraph", options=options)
    for micro in range(micro_batches):
        is_last = micro == micro_batches - 1
        with nullcontext() if is_last else dsgraph.accumulate(model):
            loss = compiled(*inputs)
            report = dsgraph.report(model)
            loss.backward()
    assert stage < 3 or not any(item.bytes_replica for item in dsgraph.report(model).parameters)
    return report


def _tokens(length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(2, length, dtype=torch.int64)
    return tokens, tokens


def _held(report: Report) -> dict[str, int]:
    return {item.name: item.bytes_replica for item in report.parameters if item.is_held_for_step}


def test_on_a_cpu_nothing_is_held_unless_asked():
    report = _train(GPT(CONFIG), *_tokens(), limit=None)
    assert not _held(report) and len(report.compiles) == 1
    assert "gathered once a step" not in str(report)


def test_with_memory_to_spare_all_are_held_from_the_first_micro_batch_to_the_last():
    report = _train(GPT(CONFIG), *_tokens(), limit=10**9)
    full = {item.name: item.bytes_full for item in report.parameters if item.split_over}
    assert _held(report) == full and len(full) == MATRICES
    assert "gathered once a step inside accumulate: embedding.weight, blocks.0.attention.qkv.weight" in str(report)
    assert report.step.accumulated_once_bytes == sum(full.values()) * 7 // 8
    assert len(report.compiles) == 2


def test_without_accumulate_nothing_is_held():
    report = _train(GPT(CONFIG), *_tokens(), limit=10**9, micro_batches=1)
    assert set(_held(report).values()) == {0}
    assert report.step.accumulated_each_bytes is None, "its graphs are still to be compiled"


def test_the_predicted_peak_stays_within_the_limit():
    tight = _train(GPT(CONFIG), *_tokens(64), limit=None).memory.peak
    held = []
    for limit in range(tight, tight + 400_000, 40_000):
        report = _train(GPT(CONFIG), *_tokens(64), limit=limit)
        assert report.memory.peak <= limit
        held.append(sum(_held(report).values()))
    assert held == sorted(held) and held[0] == 0 and held[-1] > 0 and len(set(held)) > 3


class _Halves(nn.Module):
    """Two graphs, neither of which reads all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).sum()


def test_of_a_part_of_a_model_nothing_is_held():
    assert not _held(_train(_Halves(), torch.randn(4, 16), limit=10**9))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_hold_what_they_always_hold(stage):
    assert not _held(_train(GPT(CONFIG), *_tokens(), limit=10**9, stage=stage))


def test_a_step_that_is_given_up_leaves_no_stale_replica():
    model = dsgraph.partition(GPT(CONFIG), stage=3, keep_whole_below=64)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "memory_limit": 10**9})
    for _ in range(2):
        with dsgraph.accumulate(model):
            compiled(*_tokens()).backward()
    state = model._dsgraph.partition
    assert len(state.replicated()) == MATRICES
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(entry.observe() is Freshness.STALE for entry in state.replicated()), "the next forward gathers them"
    compiled(*_tokens()).backward()
    assert not state.replicated()

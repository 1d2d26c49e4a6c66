from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dsgraph
from dsgraph.tools.reporting.report import Report
from examples.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=64, width=32, heads=2, layers=1)
MATRICES = 6  # of that model

pytestmark = [pytest.mark.usefixtures("fake_ranks"), pytest.mark.slow]


def _train(
    module: nn.Module, *inputs: torch.Tensor, limit: int | None, micro_batches: int = 3, stage: int = 3
) -> Report:
    """Make a step of so many micro-batches; the report is from before the last backward."""
    torch._dynamo.reset()  # a model like one before would run its graph
    model = dsgraph.partition(module, stage=stage, keep_whole_below=64)
    options = {"codegen": "eager"} if limit is None else {"codegen": "eager", "memory_limit": limit}
    compiled = torch.compile(model, backend="dsgraph", options=options)
    for micro in range(micro_batches):
        is_last = micro == micro_batches - 1
        with nullcontext() if is_last else dsgraph.accumulate(model):
            loss = compiled(*inputs)
            report = dsgraph.report(model)
            held = [weakref.ref(entry.gathered_copy) for entry in model._dsgraph.partition.copied()]
            loss.backward()
    del loss
    gc.collect()
    assert stage < 3 or not any(gathered_copy() is not None for gathered_copy in held), (
        "nothing keeps what was held for the step"
    )
    return report


def _tokens(length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(2, length, dtype=torch.int64)
    return tokens, tokens


def _held(report: Report) -> dict[str, int]:
    return {item.name: item.bytes_copy for item in report.parameters if item.is_held_for_step}


def test_on_a_cpu_nothing_is_held_unless_asked():
    report = _train(GPT(CONFIG), *_tokens(), limit=None)
    assert not _held(report) and len(report.compiles) == 1
    assert "gathered once a step" not in str(report)


def test_with_memory_to_spare_all_are_held_from_the_first_micro_batch_to_the_last():
    report = _train(GPT(CONFIG), *_tokens(), limit=10**9)
    full = {item.name: item.bytes_full for item in report.parameters if item.split_over}
    assert _held(report) == full and len(full) == MATRICES
    assert "gathered once per step inside accumulate: embedding.weight, blocks.0.attention.qkv.weight" in str(report)
    assert report.step.accumulated_once_bytes == sum(full.values()) * 7 // 8
    assert len(report.compiles) == 2


def test_without_accumulate_nothing_is_held():
    report = _train(GPT(CONFIG), *_tokens(), limit=10**9, micro_batches=1)
    assert set(_held(report).values()) == {0}
    assert report.step.accumulated_each_bytes is None, "its graphs are still to be compiled"


class _Wide(nn.Module):
    """Much of its memory is gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 128), nn.Linear(128, 300)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(3)
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("build", "length"),
    [pytest.param(partial(GPT, CONFIG), 64, marks=pytest.mark.full), pytest.param(_Wide, 16, marks=pytest.mark.full)],
)
def test_the_predicted_peak_stays_within_the_limit(build, length):
    tight = _train(build(), *_tokens(length), limit=None).memory.peak
    held = []
    for part in (1, 1.15, 1.3, 1.45, 1.48, 1.51, 1.54, 1.57, 1.6, 1.75):
        report = _train(build(), *_tokens(length), limit=int(part * tight))
        assert report.memory.peak <= part * tight
        held.append(sum(_held(report).values()))
    assert held == sorted(held) and held[0] == 0 and held[-1] > 0 and len(set(held)) >= 3


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


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 2])
def test_other_stages_hold_what_they_always_hold(stage):
    assert not _held(_train(GPT(CONFIG), *_tokens(), limit=10**9, stage=stage))


def _compiled(limit: int = 10**9) -> tuple[nn.Module, nn.Module]:
    """A model that holds parameters in the next `accumulate`, and what runs it."""
    torch._dynamo.reset()
    model = dsgraph.partition(GPT(CONFIG), stage=3, keep_whole_below=64)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "memory_limit": limit})
    compiled(*_tokens()).backward()
    return model, compiled


def test_an_optimizer_step_ends_a_step_whose_micro_batches_were_all_inside():
    model, compiled = _compiled()
    state = model._dsgraph.partition
    with dsgraph.accumulate(model):
        compiled(*_tokens()).backward()
        assert len(state.copied()) == MATRICES
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not state.copied() and not state.awaiting_last_backward


def test_a_copy_has_no_part_in_the_step():
    model, compiled = _compiled()
    with dsgraph.accumulate(model):
        compiled(*_tokens()).backward()
        model.zero_grad()  # a part of a buffer, which torch does not copy where it is a DTensor
        other = copy.deepcopy(model)
    assert len(model._dsgraph.partition.copied()) == MATRICES
    assert not other._dsgraph.partition.copied()
    with torch.no_grad():
        torch.testing.assert_close(other(*_tokens()), compiled(*_tokens()))


def test_the_least_room_of_all_graphs_counts_and_compiling_one_again_changes_nothing():
    model, compiled = _compiled(10**9)
    entries = model._dsgraph.partition.parameters
    assert sum(entry.is_held_for_step for entry in entries) == MATRICES
    tight = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "memory_limit": 230_000})
    tight(*_tokens()).backward()
    chosen = [entry.is_held_for_step for entry in entries]
    assert 0 < sum(chosen) < MATRICES
    for again in (compiled, tight):  # as a rank does alone for a batch of another length
        torch._dynamo.reset()
        again(*_tokens(12)).backward()
        assert [entry.is_held_for_step for entry in entries] == chosen


def test_of_several_partitioned_parts_nothing_is_held():
    parts = nn.ModuleList(
        dsgraph.partition(nn.Linear(16, 16, bias=False), stage=3, keep_whole_below=0) for _ in range(2)
    )
    options = {"codegen": "eager", "memory_limit": 10**9}
    one, two = (torch.compile(part, backend="dsgraph", options=options) for part in parts)
    for _ in range(2):
        with dsgraph.accumulate(parts):
            two(one(torch.ones(1, 16))).sum().backward()
            assert not any(part._dsgraph.partition.copied() for part in parts)
    assert not any(item.is_held_for_step for item in dsgraph.report(parts).parameters)
    with dsgraph.accumulate(parts[0]):
        assert len(parts[0]._dsgraph.partition.copied()) == 1, "by itself it is a whole model"


def test_what_fails_on_the_way_in_leaves_nothing(monkeypatch):
    model, compiled = _compiled()
    state = model._dsgraph.partition

    def fail() -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(state, "hold_copies", fail)
        with pytest.raises(torch.OutOfMemoryError), dsgraph.accumulate(model):
            pass
    assert not state.accumulating
    compiled(*_tokens()).backward()

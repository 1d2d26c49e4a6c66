"""The memory of the code around blocks, from a step on fake tensors, in numbers that can be added up by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.partitioning.blocks.fake_step import around_blocks
from dsgraph.partitioning.state import partition_states
from dsgraph.passes.memory.fit import MemoryLimitError

ROWS, WIDTH, CLASSES = 8, 16, 1000
ROW = 4 * ROWS


class _Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class _Model(nn.Module):
    def __init__(self, inner: tuple[int, ...] = (64, 64)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for width in inner)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def _around(model: nn.Module, x: Tensor):
    (state,) = partition_states(dsgraph.partition(model, stage=3, keep_whole_below=0))
    return around_blocks(model, state.parameters, (x,), {})


@pytest.mark.usefixtures("fake_ranks")
def test_what_exists_around_blocks_is_counted():
    model = _Model()
    found = _around(model, torch.randn(ROWS, WIDTH))
    batch, logits, head = ROW * WIDTH, ROW * CLASSES, 4 * CLASSES * WIDTH
    assert found.calls == 2 and set(found.in_flight.values()) == {2}
    assert 2 * batch <= found.beside < 2 * batch + 64, "the batch, the gradient that the head returns, and the loss"
    assert found.between >= batch + head + 3 * logits, "logits, their squares and a gradient, and the head"
    assert found.between < batch + 2 * head + 5 * logits, "the head and its gradient"
    assert model.calls == 0, "the copy ran, not the model"


@pytest.mark.usefixtures("fake_ranks")
def test_blocks_count_by_what_they_compute():
    found = _around(_Model((64, 64, 192, 192)), torch.randn(ROWS, WIDTH))
    assert found.calls == 4
    assert found.in_flight["blocks.0"] > 4 > found.in_flight["blocks.2"], found.in_flight


class _Valued(_Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x.sum()


@pytest.mark.usefixtures("fake_ranks")
def test_a_forward_that_depends_on_values_is_named():
    assert _around(_Valued(), torch.randn(ROWS, WIDTH)).startswith(
        "the forward cannot run on fake tensors: DataDependentOutputException"
    )
    with torch.no_grad():
        model = _Model().requires_grad_(False)
    assert _around(model, torch.randn(ROWS, WIDTH)) == "no output of the forward requires a gradient"


def _step(limit: int, model: nn.Module, *batches: Tensor) -> Any:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "memory_limit": limit})
    for batch in batches:
        compiled(batch).backward()
        model.zero_grad()
    return dsgraph.report(model)


@pytest.mark.usefixtures("one_rank")
def test_after_a_limit_that_is_too_small_a_larger_one_is_kept():
    model = dsgraph.partition(_Model(), stage=3, keep_whole_below=0)
    with pytest.raises(MemoryLimitError, match=r"a step takes .* at least"):
        _step(1000, model, torch.randn(ROWS, WIDTH))
    report = _step(10**8, model, torch.randn(ROWS, WIDTH))
    assert "2 repeated blocks are graphs of their own" in report.status


@pytest.mark.usefixtures("one_rank")
def test_after_a_batch_that_is_too_large_a_smaller_one_runs_under_the_same_limit():
    model = dsgraph.partition(_Model(), stage=3, keep_whole_below=0)
    with pytest.raises(MemoryLimitError) as refused:
        _step(1000, model, torch.randn(8, WIDTH))
    limit = refused.value.least
    with pytest.raises(MemoryLimitError, match=r"a step takes .* at least"):
        _step(limit, model, torch.randn(4096, WIDTH))
    assert "2 repeated blocks are graphs of their own" in _step(limit, model, torch.randn(8, WIDTH)).status


class _Pooled(_Model):
    """A model whose blocks get inputs of one size, whatever the size of the batch is."""

    def forward(self, x: Tensor) -> Tensor:
        wide = (x @ x.T).exp()
        return super().forward(x[:4] + wide.mean())


@pytest.mark.usefixtures("one_rank")
def test_what_the_plan_does_not_count_is_told():
    model = dsgraph.partition(_Pooled(), stage=3, keep_whole_below=0)
    limit = _step(10**8, model, torch.randn(8, WIDTH)).memory.peak + 50_000
    model = dsgraph.partition(_Pooled(), stage=3, keep_whole_below=0)
    with pytest.warns(UserWarning, match="the code around the blocks takes .* bytes more than was planned"):
        report = _step(limit, model, torch.randn(8, WIDTH), torch.randn(512, WIDTH))
    assert any("the code around the blocks takes" in gap for gap in report.limit_gaps)


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_an_earlier_backward_are_told():
    model = dsgraph.partition(_Model(), stage=3, keep_whole_below=0)
    limit = _step(10**8, model, torch.randn(8, WIDTH)).memory.peak + 5_000
    model = dsgraph.partition(_Model(), stage=3, keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "memory_limit": limit})
    compiled(torch.randn(8, WIDTH)).backward()
    with pytest.warns(UserWarning, match="bytes of gradients are held from an earlier backward"):
        compiled(torch.randn(8, WIDTH)).backward()


@pytest.mark.usefixtures("fake_ranks")
def test_an_object_among_the_arguments_is_not_changed():
    class Losses:
        def __init__(self) -> None:
            self.found: list[Tensor] = []

    class Noting(_Model):
        def forward(self, x: Tensor, losses: Losses) -> Tensor:
            losses.found.append(x.mean())
            return super().forward(x)

    (state,) = partition_states(model := dsgraph.partition(Noting(), stage=3, keep_whole_below=0))
    losses = Losses()
    found = around_blocks(model, state.parameters, (torch.randn(ROWS, WIDTH), losses), {})
    assert found == "an argument is a Losses, in which the forward may keep a value"
    assert not losses.found


@pytest.mark.usefixtures("fake_ranks")
def test_a_larger_batch_beside_copies_that_stay_is_told():
    model = dsgraph.partition(_Model(), stage=3, keep_whole_below=0)
    memory = _step(10**8, model, torch.randn(64, WIDTH)).memory
    limit = memory.peak - memory.parts["gathered copies"] + 5_000
    model = dsgraph.partition(_Model(), stage=3, keep_whole_below=0)
    with pytest.warns(UserWarning, match="keep as many gathered parameters as with the first batch"):
        report = _step(limit, model, torch.randn(8, WIDTH), torch.randn(64, WIDTH))
    assert any("begin with the largest batch" in gap for gap in report.limit_gaps)


@pytest.mark.usefixtures("one_rank")
def test_numbers_among_the_arguments_are_no_new_batch():
    class Numbered(_Model):
        def forward(self, x: Tensor, step: int) -> Tensor:
            return super().forward(x) * (1 + 0 * step)

    model = dsgraph.partition(Numbered(), stage=3, keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "memory_limit": 10**8})
    for step in range(4):
        compiled(torch.randn(8, WIDTH), step).backward()
        model.zero_grad()
    (state,) = partition_states(model)
    assert len(state.step.limit.counted) == 1

"""`memory_limit` with blocks as graphs of their own: the measured memory stays under it, and no number changes."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph
from dsgraph.passes.memory.fit import PLANNED, MemoryLimitError
from examples.gpt import GPT, GPTConfig
from tests.distributed.allocations import counter_of
from tests.distributed.training import full

pytestmark = pytest.mark.distributed

ROWS, TIME, VOCAB = 4, 64, 256


def _gpt() -> nn.Module:
    return GPT(GPTConfig(vocab=VOCAB, width=64, heads=2, layers=4))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, use_cache=False))


class _Valued(nn.Module):
    """A model whose forward depends on values, which no tensor without values has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _gpt()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.inner(tokens, targets)
        return loss * 2 if tokens.max().item() > VOCAB else loss


BUILDS = {"gpt": _gpt, "llama": _llama, "valued": _Valued}


def _batch(case: str, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, VOCAB, (ROWS, TIME), generator=generator)
    if case == "llama":
        return {"input_ids": tokens, "labels": tokens}
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def _train(
    library: str, case: str, limit: int | None, *, micro_batches: int = 1, codegen: str = "eager", **how: Any
) -> tuple[int, list[Tensor], dsgraph.Report]:
    """Return the measured peak of a step, losses and gradients, and the report."""
    torch._dynamo.reset()
    gc.collect()
    counter = counter_of(library)
    before = counter.live
    torch.manual_seed(0)
    model = dsgraph.partition(BUILDS[case](), stage=3, keep_whole_below=12, **how)
    options = {"codegen": codegen} | ({} if limit is None else {"memory_limit": limit})
    compiled = torch.compile(model, backend="dsgraph", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    found, peak = [], 0
    for step in range(2):
        gc.collect()
        counter.reset_peak()
        for number in range(micro_batches):
            with dsgraph.accumulate(model) if number < micro_batches - 1 else nullcontext():
                outputs = compiled(**_batch(case, micro_batches * step + number))
                loss = outputs if isinstance(outputs, Tensor) else outputs.loss
                loss.backward()
        peak = max(peak, counter.peak - before)
        found += [loss.detach(), *(full(param.grad).clone() for param in model.parameters())] if step == 1 else []
        optimizer.step()
        optimizer.zero_grad()
        peak = max(peak, counter.peak - before) if step < 1 else peak
    return peak, found, dsgraph.report(compiled)


def _is_of_blocks(report: dsgraph.Report) -> bool:
    return any(len(unit.modules) > 1 for unit in report.units)


def _equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _planned(report: dsgraph.Report) -> list[str]:
    return [line for each in report.compiles for item in each.passes if item.name == PLANNED for line in item.done]


def _keeps(library: str, case: str) -> None:
    most, usual, report = _train(library, case, None)
    assert _is_of_blocks(report)
    limit = int(0.75 * most)
    peak, numbers, report = _train(library, case, limit)
    assert _is_of_blocks(report)
    assert _equal(numbers, usual)
    assert peak <= limit
    assert report.memory.peak <= limit and not report.limit_gaps
    assert any("recomputation takes" in line for line in _planned(report))


@pytest.mark.parametrize("case", ("gpt", pytest.param("llama", marks=pytest.mark.full)))
def test_a_step_of_blocks_stays_under_its_limit_with_the_same_numbers(ranks, library, case):
    ranks(2).run(_keeps, library, case)


def _keeps_with_inductor(library: str) -> None:
    most, usual, _ = _train(library, "gpt", None, codegen="inductor")
    limit = int(0.9 * most)
    peak, numbers, report = _train(library, "gpt", limit, codegen="inductor")
    assert _is_of_blocks(report) and not report.limit_gaps and peak <= limit
    assert any("recomputation takes" in line for line in _planned(report))
    for mine, theirs in zip(numbers, usual, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.inductor
def test_a_limit_is_planned_with_inductor(ranks, library):
    ranks(2).run(_keeps_with_inductor, library)


def _refuses(library: str) -> None:
    _, usual, _ = _train(library, "gpt", None)
    with pytest.raises(MemoryLimitError) as refused:
        _train(library, "gpt", 1000, blocks="none")
    least = refused.value.least
    with pytest.raises(MemoryLimitError, match=r'One graph .*: use partition\(blocks="none"\)') as refused:
        _train(library, "gpt", least)
    peak, numbers, _ = _train(library, "gpt", least, blocks="none")
    assert _equal(numbers, usual) and peak <= least < refused.value.least
    peak, numbers, report = _train(library, "gpt", refused.value.least)
    assert _is_of_blocks(report) and _equal(numbers, usual) and peak <= refused.value.least


def test_a_limit_that_blocks_cannot_keep_is_refused_with_a_remedy_that_works(ranks, library):
    ranks(1).run(_refuses, library)


def _depends_on_values(library: str) -> None:
    with pytest.raises(MemoryLimitError, match=r"the forward cannot run on fake tensors: DataDep.*\(blocks=.none.\)"):
        _train(library, "valued", 10**9)
    _, _, report = _train(library, "valued", 10**9, blocks="none")
    assert not _is_of_blocks(report)


def test_a_model_that_depends_on_values_is_refused_with_a_remedy_that_works(ranks, library):
    ranks(1).run(_depends_on_values, library)


def _keeps_copies(library: str) -> None:
    most, usual, report = _train(library, "gpt", None, micro_batches=2)
    sent = report.step
    peak, numbers, report = _train(library, "gpt", 2 * most, micro_batches=2)
    assert _equal(numbers, usual)
    kept = next(item.activations.kept_names for item in report.compiles if item.kind == "step")
    assert {name.rpartition(".")[0].partition(".")[2][:1] for name in kept if name.startswith("blocks.")} == set("0123")
    assert report.step.sent_bytes < 0.8 * sent.sent_bytes
    assert report.step.accumulated_each_bytes < 0.6 * sent.accumulated_each_bytes
    assert most < peak <= report.memory.peak


def test_memory_that_is_left_keeps_the_parameters_of_blocks_for_the_backward(ranks, library):
    ranks(2).run(_keeps_copies, library)

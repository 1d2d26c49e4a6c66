"""Regions: what Inductor compiles once for all blocks computes what each block computes by itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsgraph
from dsgraph.compiler.codegen import REGIONS
from examples.gpt import GPT, GPTConfig
from tests.distributed.training import compare, full
from tests.models import VOCAB, tokens, tokens_of_any_length

pytestmark = [pytest.mark.distributed, pytest.mark.inductor]

DEEP = GPTConfig(vocab=VOCAB, width=16, heads=2, layers=4)


class _Checkpointed(GPT):
    def __init__(self) -> None:
        super().__init__(DEEP)
        for block in self.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _frozen() -> nn.Module:
    model = GPT(DEEP)
    model.blocks[1].requires_grad_(False)
    return model


BUILDS = {
    "gpt": lambda: GPT(DEEP),
    "tied": lambda: GPT(GPTConfig(vocab=VOCAB, width=16, heads=2, layers=4, tie=True)),
    "frozen": _frozen,
    "checkpointed": _Checkpointed,
    "any_length": lambda: GPT(DEEP),
}


def _compare(case: str, **how: object) -> None:
    compare(
        BUILDS[case],
        tokens_of_any_length if case == "any_length" else tokens,
        codegen="inductor",
        regions="auto",
        **how,
    )  # type: ignore[arg-type]


def _calls(compiled: nn.Module) -> int:
    """How many calls of regions the graphs of a model hold."""
    passes = [item for each in dsgraph.report(compiled).compiles for item in each.passes]
    return sum(item.changed for item in passes if item.name == REGIONS)


@pytest.mark.parametrize(("stage", "micro_batches"), ((0, 2), (3, 1)))
def test_blocks_that_share_their_code_learn_as_one_process_does(ranks, stage, micro_batches):
    ranks(1).run(_compare, "gpt", stage=stage, micro_batches=micro_batches)


@pytest.mark.full
@pytest.mark.parametrize("case", sorted(BUILDS))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("micro_batches", (1, 2))
def test_every_stage_and_kind_of_model(ranks, case, stage, micro_batches):
    ranks(2).run(_compare, case, stage=stage, micro_batches=micro_batches)


class _Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:  # the derivative with respect to the scale is twice the result over it
        return nn.functional.dropout(x * torch.exp(2 * torch.log(self.scale)), 0.5)


class _Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Drop() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _draw() -> None:
    torch.manual_seed(0)
    model = dsgraph.partition(_Drops(), stage=3, keep_whole_below=12)
    compiled = torch.compile(model, backend="dsgraph", options={"regions": "auto"})
    x = torch.ones(256, 64)
    with torch._inductor.config.patch(force_disable_caches=True):  # of what comes from a cache, no calls are told
        first = compiled(x)
    first.sum().backward()
    assert _calls(compiled) >= 4
    kept = (first != 0).float().mean().item()
    assert 0.5**6 < kept < 0.5**4, "blocks draw numbers of their own"
    for block in model.blocks:
        expected = (2 * first.detach() / full(block._parameters["scale"])).sum(0)
        torch.testing.assert_close(full(block._parameters["scale"].grad), expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(compiled(x) != 0, first != 0), "and others the next time"


def test_each_block_draws_its_own_numbers_and_the_same_when_it_is_computed_again(ranks):
    ranks(1).run(_draw)


def _count(regions: object) -> int:
    torch.manual_seed(0)
    model = dsgraph.partition(GPT(DEEP), stage=3, keep_whole_below=12)
    compiled = torch.compile(model, backend="dsgraph", options={"regions": regions})
    compiled(*tokens(0, 0)).backward()
    return _calls(compiled)


@pytest.mark.full
def test_the_option_says_which_blocks_count(ranks):
    (automatic,), (named,), *others = (ranks(1).run(_count, way) for way in ("auto", ["blocks"], ["layers"], "none"))
    assert automatic == named > 0
    assert others == [[0], [0]]

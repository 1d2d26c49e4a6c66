"""Blocks under Inductor: what shares its code computes what each computes by itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from examples.gpt import GPT, GPTConfig
from tests.distributed.training import compare
from tests.models import VOCAB, tokens, tokens_of_any_length

pytestmark = [pytest.mark.distributed, pytest.mark.inductor]

DEEP = GPTConfig(vocab=VOCAB, width=16, heads=2, layers=4)


class _Tanh(nn.Module):
    """A block of few kernels: compiling each takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB, bias=False)
        self.blocks = nn.ModuleList(_Tanh() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


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
    "layers": _Layers,
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
        **how,
    )  # type: ignore[arg-type]


def test_blocks_that_share_their_code_learn_as_one_process_does(ranks):
    ranks(1).run(_compare, "layers", stage=0, micro_batches=2, steps=2)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "micro_batches"), ((0, 2), (3, 1)))
def test_so_do_those_of_a_gpt(ranks, stage, micro_batches):
    ranks(1).run(_compare, "gpt", stage=stage, micro_batches=micro_batches, steps=2)


@pytest.mark.full
@pytest.mark.parametrize("case", sorted(BUILDS))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("micro_batches", (1, 2))
def test_every_stage_and_kind_of_model(ranks, case, stage, micro_batches):
    ranks(2).run(_compare, case, stage=stage, micro_batches=micro_batches)

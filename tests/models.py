"""Small models for tests, each with batches to train it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig

VOCAB = 32


def tokens(step: int, rank: int, *, batch: int = 2, time: int = 8) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    data = torch.randint(0, VOCAB, (batch, time + 1), generator=generator)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def features(step: int, rank: int, *, batch: int = 3, width: int = 7) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(batch, width, generator=generator), torch.randn(batch, 5, generator=generator)


def tokens_of_any_length(step: int, rank: int) -> tuple[Tensor, ...]:
    return tokens(step, rank, batch=2 + step % 2, time=(8, 12, 10, 7)[step % 4])


def tokens_of_marked_length(step: int, rank: int) -> tuple[Tensor, ...]:
    batch = tokens_of_any_length(step, rank)
    for tensor in batch:
        torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(tensor, 1)
    return batch


class Uneven(nn.Module):
    """Rows that divide by no world size, fewer rows than ranks, a scalar, an empty parameter and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.one_row = nn.Parameter(torch.randn(1, 11))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 11))
        self.volume = nn.Parameter(torch.randn(5, 11, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * self.one_row + self.scalar
        h = torch.cat([h, self.empty]).sum(0, keepdim=True) + h
        return F.mse_loss((h @ self.volume.sum(-1).t()), y)


class Frozen(nn.Module):
    """A frozen layer in the middle, whose input still needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(7, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.middle.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(F.gelu(self.middle(F.gelu(self.first(x))))), y)


class Broken(nn.Module):
    """A graph break between two uses of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.middle(self.embedding(x)))
        torch._dynamo.graph_break()
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Tagger(nn.Module):
    """A little of a language model: sizes that change are compiled several times, and this takes little each time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Linear(16, VOCAB)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embedding(x)
        h = h + torch.tanh(self.middle(h)).cumsum(1)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Tied(nn.Module):
    """A weight that is used twice and a norm: a language model that compiles in a third of the time of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.middle = nn.Embedding(VOCAB, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embedding(x)
        h = h + torch.tanh(self.middle(self.norm(h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class Case:
    """A model and its data. `batches(step, rank)` gives the arguments of forward."""

    build: Callable[[], nn.Module]
    batches: Callable[[int, int], tuple[Tensor, ...]]


SMALL = GPTConfig(vocab=VOCAB, width=16, heads=2, layers=1)

CASES: dict[str, Case] = {
    "gpt": Case(lambda: GPT(SMALL), tokens),
    "tied": Case(lambda: GPT(GPTConfig(vocab=VOCAB, width=16, heads=2, layers=1, tie=True)), tokens),
    "frozen": Case(Frozen, features),
    "uneven": Case(Uneven, features),
    "graph_break": Case(Broken, tokens),
    "dynamic": Case(Tagger, tokens_of_any_length),
    "dynamic_gpt": Case(lambda: GPT(SMALL), tokens_of_any_length),
    "marked_dynamic": Case(Tagger, tokens_of_marked_length),
    "marked_dynamic_gpt": Case(lambda: GPT(SMALL), tokens_of_marked_length),
    "dropout": Case(lambda: GPT(GPTConfig(vocab=VOCAB, width=16, heads=2, layers=1, dropout=0.3)), tokens),
}


# For tests of what is around a model: products of parameters leave these out.
SMALLER: dict[str, Case] = {"small": Case(Tied, tokens)}


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return {**CASES, **SMALLER}[name].build()

"""Batches of text: those of a step are drawn from seed and step alone, and dealt to the ranks."""

from __future__ import annotations

import torch

from examples.text import Text

TEXT = Text(
    torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)), torch.zeros(9)
)


def _batch(step: int, seed: int, *, rank: int = 0, world: int = 1) -> torch.Tensor:
    return TEXT.batch(step, size=4, time=16, seed=seed, rank=rank, world=world)[0]


def test_seed_and_step_choose_the_windows():
    drawn = {(seed, step): _batch(step, seed) for seed in (0, 1, 7) for step in (0, 1)}
    assert len({tuple(batch.flatten().tolist()) for batch in drawn.values()}) == len(drawn)
    assert torch.equal(_batch(1, 7), drawn[7, 1])


def test_ranks_share_the_batch():
    parts = [_batch(3, 0, rank=rank, world=2) for rank in range(2)]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), _batch(3, 0))

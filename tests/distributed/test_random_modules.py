"""Random small modules with odd shapes, against one process."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.distributed.training import compare

pytestmark = pytest.mark.distributed


class RandomNet(nn.Module):
    """Layers of the given widths; `extras` are further parameters of odd shapes that are mixed in."""

    def __init__(self, widths: list[int], bias: bool, tie: bool, frozen: int, extras: list[tuple[int, ...]]) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairs)
        if tie and len(pairs) > 1:
            for index, pair in enumerate(pairs[1:], start=1):
                if pair == pairs[0]:
                    self.layers[index].weight = self.layers[0].weight
        if frozen < len(pairs) - 1:
            self.layers[frozen].weight.requires_grad_(False)
        self.extras = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in extras)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        # Divided one by one: plain torch would give two 0-dimensional parameters one tensor as their gradients.
        scale = 1.0 + sum((extra / 10).sum() for extra in self.extras)
        return (x * scale - y).pow(2).mean()


def _check(widths, bias, tie, frozen, extras, stage, keep_whole_below, codegen) -> None:
    def batches(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(2, widths[0], generator=generator), torch.randn(2, widths[-1], generator=generator)

    compare(
        lambda: RandomNet(widths, bias, tie, frozen, extras),
        batches,
        stage=stage,
        keep_whole_below=keep_whole_below,
        codegen=codegen,
        steps=2,
    )


width = st.sampled_from([1, 2, 3, 5, 6, 7])
shape = st.lists(st.sampled_from([0, 1, 2, 3, 5]), min_size=0, max_size=3).map(tuple)


@pytest.mark.full  # test_stages has the pairs
@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.full)))
def test_random_modules_match_one_process(ranks, world):
    @settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        widths=st.lists(width, min_size=2, max_size=4),
        bias=st.booleans(),
        tie=st.booleans(),
        frozen=st.integers(0, 4),
        extras=st.lists(shape, max_size=3),
        stage=st.sampled_from([0, 1, 2, 3]),
        keep_whole_below=st.sampled_from([0, 4, 20]),
        codegen=st.sampled_from(["eager", None]),
    )
    def check(**how):
        ranks(world).run(_check, **how)

    check()

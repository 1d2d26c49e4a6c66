"""Kernels in partitioned models: what they read is gathered, and what they give is reduced."""

from __future__ import annotations

import pytest

from tests.distributed.training import compare
from tests.models import CASES, tokens_of_any_length

pytestmark = pytest.mark.distributed


def _train(kernels: list[str], stage: int, micro_batches: int) -> None:
    compare(
        CASES["gpt"].build,
        tokens_of_any_length,
        stage=stage,
        micro_batches=micro_batches,
        kernels=kernels,
        strict=True,
        evaluate=True,
        steps=2,
    )


@pytest.mark.full  # the kernel's own tests and test_transformers
@pytest.mark.parametrize(
    ("stage", "micro_batches"),
    [pytest.param(0, 1, marks=pytest.mark.full), (2, 2), pytest.param(3, 1, marks=pytest.mark.full)],
)
def test_a_head_without_logits_matches_one_process(ranks, stage, micro_batches):
    ranks(2).run(_train, ["linear_cross_entropy"], stage, micro_batches)


@pytest.mark.full  # the kernel's own tests and test_transformers
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_norms_of_sums_match_one_process(ranks, stage):
    ranks(2).run(_train, ["add_rms_norm", "rms_norm"], stage, 1)

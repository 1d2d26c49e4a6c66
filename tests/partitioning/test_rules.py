"""Anomaly detection asks gradients for NaNs, which are shards wherever a parameter is."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.experimental import register_sharding

import dsgraph
from dsgraph.partitioning.rules import register_rules
from tests.distributed.training import compare
from tests.models import CASES

pytestmark = pytest.mark.distributed


class Weighed(nn.Module):
    """Its gradient is its input, so that a test can choose it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()  # the line to be named


def _train(stage: int, codegen: str | None, micro_batches: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection")
        with torch.autograd.set_detect_anomaly(True):
            case = CASES["uneven"]
            compare(case.build, case.batches, stage=stage, codegen=codegen, steps=2, micro_batches=micro_batches)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize("micro_batches", (1, 2))
def test_anomaly_detection_lets_training_be(ranks, stage, codegen, micro_batches):
    ranks(2).run(_train, stage, codegen, micro_batches)


def _meet(stage: int, keep_whole_below: int) -> tuple[str, str]:
    """Infinities of both signs meet in the sum over ranks: the NaNs are in the first row. What a rank is told."""
    model = dsgraph.partition(Weighed(), stage=stage, keep_whole_below=keep_whole_below)
    x = torch.ones(4, 4)
    x[0] = float("inf") if dist.get_rank() == 0 else -float("inf")
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True):
            try:
                model(x).backward()
            except RuntimeError as raised:
                error = str(raised)
    return error, "\n".join(str(item.message) for item in caught)


@pytest.mark.parametrize(("stage", "keep_whole_below"), ((0, 0), (1, 0), (3, 0), (3, 100)))
def test_a_nan_is_found_where_its_row_is_and_the_line_is_named(ranks, stage, keep_whole_below):
    first, second = ranks(2).run(_meet, stage, keep_whole_below, timeout_s=30)
    for error, warning in [first] if stage and not keep_whole_below else [first, second]:
        assert "returned nan values" in error
        assert "# the line to be named" in warning
    if stage and not keep_whole_below:
        assert second[0] == ""


def test_the_last_rule_counts(one_rank):
    """Torch's rule, or a user's, and ours do the same: it does not matter which was registered last."""
    asked = []

    @register_sharding(torch.ops.aten._is_any_true.default)
    def rule(values):
        asked.append(values)
        return [([torch.distributed.tensor.Replicate()], [torch.distributed.tensor.Replicate()])]

    try:
        for is_ours in (False, True):
            if is_ours:
                register_rules()
            model = dsgraph.partition(nn.Linear(3, 3 + is_ours), stage=3, keep_whole_below=0)
            with torch.autograd.set_detect_anomaly(True):
                model(torch.ones(2, 3)).sum().backward()
            assert torch.equal(model._parameters["bias"].grad.full_tensor(), torch.full((3 + is_ours,), 2.0))
        assert asked
    finally:
        register_rules()

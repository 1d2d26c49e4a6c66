"""Each pair of features trains as one process does, or is refused by name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from .features import FEATURES, REFUSED, completed, pairs
from .page import page
from .training import STEPS, train, world

pytestmark = pytest.mark.distributed

_TOLERANCES = {"bf16": 3e-2, "fp16": 5e-3, "quantized training": 1e-3}


def compare(ranks, names, folder, *, steps=STEPS, within=2e-5):
    """Return an empty text if the losses of a run are those of one process, otherwise what is wrong."""
    names = completed(names)
    by_rank = ranks(world(names)).run(train, names, folder, alone=False, steps=steps)
    errors = [text for text in by_rank if isinstance(text, str)]
    if errors:
        return errors[0]
    (expected,) = ranks(1).run(train, names, folder, alone=True, steps=steps)
    if isinstance(expected, str):
        return f"in one process: {expected}"
    found = [sum(losses) / len(by_rank) for losses in zip(*by_rank, strict=True)]
    worst = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
    limit = max([within, *(_TOLERANCES.get(name, 0.0) for name in names)])
    return "" if worst <= limit and math.isfinite(worst) else f"losses differ by {worst:.1e}: {found} and {expected}"


TOGETHER = (
    ("sequence parallelism", "tensor slices", "activation checkpointing", "evaluation"),
    ("pipeline stages", "accumulation", "adapters", "checkpoints"),
    ("ZeRO stage 1", "1-bit Adam", "one graph"),
    ("ZeRO stage 2", "optimizer on disk", "activation offload"),
    ("ZeRO stage 3", "parameters on disk", "memory limit"),
    ("ZeRO stage 3", "blocks", "sparse attention"),
    ("uncompiled", "layer dropping"),
    ("pipeline stages", "bf16"),
    ("fp16",),
    ("quantized training",),
)
"""Features of the runs of `make test`. Those with a wide tolerance are in runs where it hides little else."""


def test_each_feature_is_in_a_run():
    assert {name for names in TOGETHER for name in names} == {feature.name for feature in FEATURES}


@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_features_together(ranks, tmp_path, names):
    assert compare(ranks, names, str(tmp_path)) == ""


@pytest.mark.full  # `make test` runs several together
@pytest.mark.parametrize("name", [feature.name for feature in FEATURES])
def test_each_feature_alone(ranks, tmp_path, name):
    assert compare(ranks, (name,), str(tmp_path)) == ""


@pytest.mark.full
@pytest.mark.parametrize(("one", "other"), pairs())
def test_each_pair(ranks, tmp_path, one, other):
    found = compare(ranks, (one, other), str(tmp_path))
    refusals = [refusal for refusal in REFUSED if refusal.applies((one, other))]
    if refusals:
        assert refusals[0].error in found
    else:
        assert found == ""


@pytest.mark.full
@pytest.mark.parametrize("precision", ("", "bf16", "fp16"))
def test_two_by_two_by_two_ranks(ranks, tmp_path, precision):
    names = ("ZeRO stage 1", "tensor slices", "pipeline stages", "activation checkpointing", precision)
    found = compare(ranks, tuple(filter(None, names)), str(tmp_path), steps=20, within=1e-5)
    assert found == ""


def test_the_page_shows_the_table():
    assert (Path(__file__).parents[2] / "docs/reference/composition.md").read_text() == page()

"""Captured layouts agree with the formulas where both count the same."""

from __future__ import annotations

from functools import cache

import pytest

from dsgraph.parallel.planning.gpus import gpu_of
from dsgraph.parallel.planning.layout import ModelShape, RankLayout, TrainingSetup
from dsgraph.tools.planning.captured_layout import compare
from dsgraph.utils.errors import LayoutError

WIDTH, LAYERS, SEQ, HEADS = 512, 6, 64, 8
PARAMS = 12 * LAYERS * WIDTH**2
MODEL = ModelShape(PARAMS, LAYERS, WIDTH, SEQ, vocab=WIDTH, heads=HEADS)


@cache
def _compare(stage: int, *, pp: int = 1, checkpointing: bool = True):
    training = TrainingSetup(batch=32, zero_stage=stage, micro_batch=2, checkpointing=checkpointing)
    return compare(MODEL, RankLayout(1, pp, 4), training, gpu=gpu_of("a100-40gb"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "pp", "checkpointing"), [(3, 1, False), pytest.param(1, 3, True, marks=pytest.mark.full)]
)
def test_activations_are_what_the_formulas_say(stage, pp, checkpointing):
    found = _compare(stage, pp=pp, checkpointing=checkpointing)
    layer = SEQ * 2 * WIDTH * (2 if checkpointing else 34 + 5 * HEADS * SEQ / WIDTH)
    assert found.captured["activations"] == pytest.approx(layer * LAYERS / pp * pp, rel=0.01)
    assert found.captured["activations"] == pytest.approx(found.formula["activations"], rel=0.01)
    assert found.of.two.nodes > found.of.one.nodes > 100


def test_sliced_layers_are_refused():
    with pytest.raises(LayoutError, match="tp is 2, and --compile does not support tensor parallelism yet: use tp 1"):
        compare(MODEL, RankLayout(2, 1, 4), TrainingSetup(batch=32), gpu=gpu_of("a100-40gb"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"),
    [
        pytest.param(0, 0, 4, 12, marks=pytest.mark.full),
        pytest.param(2, 2, 1, 3, marks=pytest.mark.full),
        pytest.param(1, 2, 1, 3, marks=pytest.mark.full),
        (3, 0, 1, 3),
    ],
)
def test_states_are_split_as_the_stage_says(stage, parameters, gradients, optimizer):
    held = _compare(stage, pp=1, checkpointing=stage != 3).captured
    for part, of_a_parameter in (("parameters", parameters), ("gradients", gradients), ("optimizer", optimizer)):
        assert held[part] == pytest.approx(of_a_parameter * PARAMS, rel=0.03), "biases and norms come on top"

from __future__ import annotations

from dsgraph.parallel.planning.gpus import gpu_of
from dsgraph.parallel.planning.layout import TrainingSetup
from dsgraph.parallel.planning.search import search
from tests.parallel.layouts import SMALL_OF_16_HEADS, TRILLION


def test_layouts_are_ranked_by_time_and_fit():
    found = search(TRILLION, TrainingSetup(batch=4096), gpu=gpu_of("a100-40gb"), gpus=4096)
    seconds = [plan.values["step"] for plan in found.fitting]
    assert seconds == sorted(seconds) and len(seconds) > 1
    assert all(plan.fullest <= 0.92 * 40 * 2**30 for plan in found.fitting)
    assert all(plan.fullest > 0.92 * 40 * 2**30 for plan in found.too_large)
    best = found.fitting[0].layout
    assert (best.tp, best.pp, best.dp) == (8, 64, 8)  # what was published


def test_every_layout_is_accounted_for_once():
    found = search(SMALL_OF_16_HEADS, TrainingSetup(batch=48), gpu=gpu_of("a100-80gb"), gpus=24)
    layouts = [plan.layout for plan in (*found.fitting, *found.too_large)]
    assert len(set(layouts)) == len(layouts)
    assert all(layout.gpus == 24 and layout.tp in (1, 2, 4, 8) for layout in layouts)
    # 24 is 1, 2, 3, 4, 6 or 8 times as many: 8 + 6 + 4 + 4 + 3 + 2 ways to divide the rest
    assert len(layouts) + sum(found.refused.values()) == 8 + 6 + 4 + 4 + 3 + 2
    assert found.refused == {"tp": 7}


def test_zero_makes_room():
    plain, split = (
        search(SMALL_OF_16_HEADS, TrainingSetup(batch=64, zero_stage=stage), gpu=gpu_of("v100-32gb"), gpus=16)
        for stage in (0, 1)
    )
    assert len(split.fitting) >= len(plain.fitting)
    smallest = {plan.layout: plan.fullest for plan in (*plain.fitting, *plain.too_large)}
    for plan in (*split.fitting, *split.too_large):
        assert plan.fullest <= smallest[plan.layout]

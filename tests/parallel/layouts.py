"""Models and layouts with published figures."""

from __future__ import annotations

from typing import Any

from dsgraph.parallel.planning.gpus import gpu_of
from dsgraph.parallel.planning.layout import ModelShape, RankLayout, TrainingSetup
from dsgraph.parallel.planning.layout_plan import LayoutPlan, plan

GIB = 2**30
TRILLION = ModelShape(params=10**12, layers=298, hidden=17408, seq=2048, vocab=51200, heads=136)
SMALL = ModelShape(params=1_540_000_000, layers=48, hidden=1600, seq=1024, vocab=50304, heads=25)
SMALL_OF_16_HEADS = ModelShape(params=1_300_000_000, layers=24, hidden=2048, seq=1024, vocab=50304, heads=16)


def planned(
    model: ModelShape, *, tp: int, pp: int, dp: int, batch: int, gpu: str = "a100-40gb", **training: Any
) -> LayoutPlan:
    layout = RankLayout(tp, pp, dp)
    return plan(model, layout, TrainingSetup(batch=batch, **training), gpu=gpu_of(gpu), gpus=layout.gpus)

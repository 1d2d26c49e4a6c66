"""All layouts of a model over GPUs, the fastest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from sympy import divisors

from .gpus import NodeGpu
from .layout import ModelShape, RankLayout, TrainingSetup, refusal
from .layout_plan import LayoutPlan, plan


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        fitting: Layouts whose memory fits, by predicted time of a step, then by memory.
        too_large: Layouts that only need too much memory, by memory.
        refused: Number of impossible layouts, by the first word of the reason: the number that does not fit.
    """

    fitting: tuple[LayoutPlan, ...]
    too_large: tuple[LayoutPlan, ...]
    refused: dict[str, int]


def search(model: ModelShape, training: TrainingSetup, *, gpu: NodeGpu, gpus: int) -> SearchResult:
    """Try every tp x pp x dp = gpus with tp inside a node."""
    plans = []
    refused: Counter[str] = Counter()
    for layout in _layouts(gpu, gpus):
        reason = refusal(layout, model, training, gpu=gpu, gpus=gpus)
        if reason is None:
            plans.append(plan(model, layout, training, gpu=gpu, gpus=gpus))
        else:
            refused[reason.split()[0]] += 1
    fitting = sorted((item for item in plans if item.fits), key=lambda item: (item.values["step"], item.fullest))
    too_large = sorted((item for item in plans if not item.fits), key=lambda item: item.fullest)
    return SearchResult(tuple(fitting), tuple(too_large), dict(refused))


def _layouts(gpu: NodeGpu, gpus: int) -> Iterator[RankLayout]:
    for tp in range(1, min(gpu.per_node, gpus) + 1):
        if gpus % tp == 0:
            rest = gpus // tp
            yield from (RankLayout(tp, pp, rest // pp) for pp in divisors(rest))

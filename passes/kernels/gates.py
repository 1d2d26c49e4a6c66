"""Gates, `activation(gate) * up`: code shared by the patterns of the gated kernels."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from dsgraph.inductor_ext.symbolic_sizes import same_shape

from .matching import before_widening, dtype_of, value_of, with_narrowing
from .spec import Match, NearMiss


def match_gate(end: Node, gate: Any, up: Any, **options: Any) -> Match | NearMiss | None:
    """Match the product `end` of an activated gate with `up` of the same size; options are those besides `dtype`."""
    ours, theirs = value_of(gate), value_of(up)
    if ours is None or theirs is None:
        return None
    if not same_shape(ours, theirs):
        return NearMiss(end, f"its gate is {list(ours.shape)} and its other half {list(theirs.shape)}")
    end = with_narrowing(end)
    return Match(end, (before_widening(gate), before_widening(up)), {"dtype": dtype_of(end), **options})

"""The rule for writing states that are sliced by heads to a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch.fx import Node

from dsgraph.inductor_ext import write_own_heads

from .slices import Outcome, Refusal, Slice, Values

_HEADS = Slice(1)


def write_heads(node: Node, values: Values) -> Outcome | Refusal:
    """Let each rank write the heads that it has computed into its own cache."""
    own, states, positions = node.args[:3]
    if values.slice_of(states) != _HEADS:
        return Refusal("a cache is written in slices that are not those of heads")
    return Outcome(_HEADS, target=write_own_heads, args=(own, states, positions), kwargs={})


CACHE: Mapping[str, Callable[[Node, Values], Outcome | Refusal]] = MappingProxyType(
    dict.fromkeys(("write_heads", "write_heads.default"), write_heads)
)

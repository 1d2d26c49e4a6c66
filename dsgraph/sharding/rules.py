"""Rules for ops on shards that torch has none for."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

# Placements of the results, placements of the arguments, along one dimension of a mesh.
Rule: TypeAlias = tuple[list[Placement], list[Placement]]


def register_rules() -> None:
    """Tells torch how the ops are computed on shards. Done again, by anyone, it changes nothing: the last rule counts.

    `torch.autograd.set_detect_anomaly` asks `_is_any_true` whether there is a NaN in a gradient, which is a shard
    wherever a parameter is.
    """
    aten = torch.ops.aten
    register_sharding(aten._is_any_true.default)(_any_true)


def _any_true(values: torch.Tensor) -> list[Rule]:
    """Each rank asks its own rows. `item()` of the result gives its own answer, and waits for nobody."""
    own: list[Rule] = [([Partial("max")], [Shard(dim)]) for dim in range(values.ndim)]
    return [([Replicate()], [Replicate()]), *own]

"""Rules for ops on shards that torch has none for, or none that gives what one process gives."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from dsgraph import compat

from .eager_agreement import eager_agreements, is_outside
from .mesh import mesh_ranks
from .rank_notes import Intent

# Placements of the results, placements of the arguments, along one dimension of a mesh.
Rule: TypeAlias = tuple[list[Placement], list[Placement]]


def register_rules() -> None:
    """Tells torch how the ops are computed on shards. Done again, by anyone, it changes nothing: the last rule counts.

    `torch.autograd.set_detect_anomaly` asks `_is_any_true` whether there is a NaN in a gradient, which is a shard
    wherever a parameter is. `item()`, `float(...)`, `if torch.isnan(p.grad).any():` ask `_local_scalar_dense` for the
    number that a tensor holds; torch gives each rank what its own rows come to.
    """
    aten = torch.ops.aten
    register_sharding(aten._is_any_true.default)(_any_true)
    _register_number()


def _any_true(values: torch.Tensor) -> list[Rule]:
    """Each rank asks its own rows. `item()` of the result gives its own answer, and waits for nobody."""
    own: list[Rule] = [([Replicate()], [Shard(dim)]) for dim in range(values.ndim)]
    return [([Replicate()], [Replicate()]), *own]


@cache  # torch takes it once
def _register_number() -> None:
    torch.library.register_torch_dispatch("aten::_local_scalar_dense", DTensor, _number)


def _number(_: type, func: Any, types: Any, args: tuple[DTensor, ...] = (), kwargs: Any = None) -> Any:
    """The number that a tensor of one element holds: the same on all ranks, which ask for it together."""
    (value,) = args
    local = value.to_local()
    if compat.is_fake(local) or all(placement.is_replicate() for placement in value.placements):
        return func(local)
    outside = is_outside()
    ranks = tuple(sorted(mesh_ranks(value.device_mesh)))
    intent = Intent("takes a number of shards, as .item() and float() do", outside)
    with eager_agreements.over(value.device_mesh, ranks).on(intent, waits=outside), torch.no_grad():
        return func(value.full_tensor())

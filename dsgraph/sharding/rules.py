"""Rules for ops on shards that torch has none for, or none that gives what one process gives."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from dsgraph import compat

from .eager_agreement import EagerAgreement, eager_agreements, is_outside
from .mesh import mesh_ranks
from .rank_notes import Intent

# Placements of the results, placements of the arguments, along one dimension of a mesh.
Rule: TypeAlias = tuple[list[Placement], list[Placement]]


def register_rules() -> None:
    """Tells torch how the ops are computed on shards. Done again, by anyone, it changes nothing: the last rule counts.

    `torch.autograd.set_detect_anomaly` asks `_is_any_true` whether there is a NaN in a gradient, which is a shard
    wherever a parameter is. `item()`, `float(...)`, `if torch.isnan(p.grad).any():` ask `_local_scalar_dense` for the
    number that a tensor holds; torch gives each rank what its own rows come to. `clip_grad_norm_` asks `_foreach_norm`
    for norms of gradients, which are summed over ranks: in a collective of torch, for which a rank that does something
    else would let the others wait.
    """
    aten = torch.ops.aten
    register_sharding(aten._is_any_true.default)(_any_true)
    _register_dispatch()


def _any_true(values: torch.Tensor) -> list[Rule]:
    """Each rank asks its own rows. `item()` of the result gives its own answer, and waits for nobody."""
    own: list[Rule] = [([Replicate()], [Shard(dim)]) for dim in range(values.ndim)]
    return [([Replicate()], [Replicate()]), *own]


@cache  # torch takes it once
def _register_dispatch() -> None:
    torch.library.register_torch_dispatch("aten::_local_scalar_dense", DTensor, _number)
    torch.library.register_torch_dispatch("aten::_foreach_norm.Scalar", DTensor, _norms)


def _number(_: type, func: Any, types: Any, args: tuple[DTensor, ...] = (), kwargs: Any = None) -> Any:
    """The number that a tensor of one element holds: the same on all ranks, which ask for it together."""
    (value,) = args
    local = value.to_local()
    if compat.is_fake(local) or all(placement.is_replicate() for placement in value.placements):
        return func(local)
    outside = is_outside()
    intent = Intent("takes a number of shards, as .item() and float() do", outside)
    with _agreement(value).on(intent, waits=outside), torch.no_grad():
        return func(value.full_tensor())


def _norms(_: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[torch.Tensor]:
    """The norm of each tensor, as torch computes it: of a shard it is partial."""
    values, *order = args
    locals_ = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    norms: list[torch.Tensor] = func(locals_, *order, **(kwargs or {}))
    alike: dict[Any, DTensor] = {}  # torch's own, of one tensor in each layout
    for number, value in enumerate(values):
        if isinstance(value, DTensor):
            layout = (value.device_mesh, value.placements)
            if layout not in alike:
                alike[layout] = torch.linalg.vector_norm(value, *order, **(kwargs or {}))
            norms[number] = compat.distributed_like(alike[layout], norms[number])
    for norm in alike.values():
        if any(placement.is_partial() for placement in norm.placements) and not compat.is_fake(norm.to_local()):
            agreement = _agreement(norm)
            if agreement.patience:
                agreement.confirm(Intent("takes the norm of gradients, as clip_grad_norm_ does"), between=True)
            break
    return norms


def _agreement(value: DTensor) -> EagerAgreement:
    """That of all ranks of a mesh."""
    return eager_agreements.over(value.device_mesh, tuple(sorted(mesh_ranks(value.device_mesh))))

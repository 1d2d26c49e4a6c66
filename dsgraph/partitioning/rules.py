"""Rules for ops on shards for which torch has no rule, or one whose result differs from that of one process."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from dsgraph.compat.dtensor import DETACH_REDUCES_NORMS, distributed_like, replicated_value
from dsgraph.compat.tensors import is_fake
from dsgraph.ranks.eager_agreement import EagerAgreement, eager_agreements, is_outside
from dsgraph.ranks.mesh import mesh_ranks
from dsgraph.ranks.rank_notes import Intent
from dsgraph.utils.errors import GradientError

from .rows import own_part

# Placements of the results, placements of the arguments, along one dimension of a mesh.
Rule: TypeAlias = tuple[list[Placement], list[Placement]]


def register_rules() -> None:
    """Register with torch how these ops are computed on shards. Repeated calls change nothing.

    - `_is_any_true`: `torch.autograd.set_detect_anomaly` calls it to find a NaN in a gradient, which may be a shard.
    - `_local_scalar_dense`: `item()`, `float(...)` and `if torch.isnan(p.grad).any():` call it to read a number. Torch
      returns the result of each rank's own rows.
    - `_foreach_norm`: `clip_grad_norm_` calls it. Torch sums the norms over ranks in a collective, in which ranks would
      wait silently for a rank that runs something else.
    - `_foreach_mul_`: `clip_grad_norm_` calls it. Gradients of `ignored_params` are plain tensors.
    - `detach`: autograd calls it for what it saves. Torch 2.15 reduces partial norms for it, in a silent collective.
    """
    aten = torch.ops.aten
    register_sharding(aten._is_any_true.default)(_any_true)
    _register_dispatch()


def _any_true(values: torch.Tensor) -> list[Rule]:
    """Return rules that test the rank's own rows; `item()` of the result waits for no other rank."""
    own: list[Rule] = [([Replicate()], [Shard(dim)]) for dim in range(values.ndim)]
    return [([Replicate()], [Replicate()]), *own]


@cache  # torch accepts one registration
def _register_dispatch() -> None:
    torch.library.register_torch_dispatch("aten::_local_scalar_dense", DTensor, _number)
    torch.library.register_torch_dispatch("aten::_foreach_norm.Scalar", DTensor, _norms)
    torch.library.register_torch_dispatch("aten::_foreach_mul_.Tensor", DTensor, _scale_all)
    if DETACH_REDUCES_NORMS:
        torch.library.register_torch_dispatch("aten::detach", DTensor, _detached)


def _detached(_: type, func: Any, types: Any, args: tuple[DTensor, ...] = (), kwargs: Any = None) -> DTensor:
    """Return the same shards, or the same partial values, without autograd."""
    (value,) = args
    return distributed_like(value, func(value.to_local()))


def _number(_: type, func: Any, types: Any, args: tuple[DTensor, ...] = (), kwargs: Any = None) -> Any:
    """Return the value of a one-element tensor, which is the same on all ranks. All ranks call it together."""
    (value,) = args
    local = value.to_local()
    if is_fake(local) or all(placement.is_replicate() for placement in value.placements):
        return func(local)
    outside = is_outside()
    intent = Intent("reads a number from shards, as .item() and float() do", outside)
    with _agreement(value).on(intent, waits=outside):
        return func(replicated_value(value))


def _norms(_: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[torch.Tensor]:
    """Return the norm of each tensor as torch computes it; the norm of a shard is partial."""
    values, *order = args
    for value in values:
        if reason := getattr(value, "dsgraph_no_norm", ""):
            raise GradientError(reason)
    known = next(value for value in values if isinstance(value, DTensor))
    values = [_over_ranks(value, known.device_mesh) if hasattr(value, "dsgraph_own") else value for value in values]
    locals_ = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    norms: list[torch.Tensor] = func(locals_, *order, **(kwargs or {}))
    alike: dict[Any, DTensor] = {}  # torch's norm of one tensor in each layout
    for number, value in enumerate(values):
        if isinstance(value, DTensor):
            layout = (value.device_mesh, value.placements)
            if layout not in alike:
                alike[layout] = torch.linalg.vector_norm(value, *order[:1])
            norms[number] = distributed_like(alike[layout], norms[number])
    for norm in alike.values():
        if any(placement.is_partial() for placement in norm.placements) and not is_fake(norm.to_local()):
            agreement = _agreement(norm)
            if agreement.patience:
                agreement.confirm(Intent("computes the global gradient norm, as clip_grad_norm_ does"), between=True)
            break
    return norms


def _over_ranks(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return gradients of which each rank has its own as one tensor over all ranks."""
    return DTensor.from_local(value.reshape(-1), mesh, [Shard(0)] * mesh.ndim, run_check=False)


def _scale_all(_: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
    """Multiply tensors in place by a number; some may be plain, as gradients of `ignored_params` are."""
    values, factor = args
    func(list(map(own_part, values)), replicated_value(factor) if isinstance(factor, DTensor) else factor)


def _agreement(value: DTensor) -> EagerAgreement:
    """Return the agreement of all ranks of a mesh."""
    return eager_agreements.over(value.device_mesh, tuple(sorted(mesh_ranks(value.device_mesh))))

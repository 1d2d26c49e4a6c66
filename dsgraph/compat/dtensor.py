"""DTensor: its local tensor, specs and placements."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

LERPS_LISTS_OF_SHARDS = torch.__version__ >= "2.13"
"""`torch._foreach_lerp_` takes shards; the foreach step of Adafactor calls it."""

DETACH_REDUCES_NORMS = torch.__version__ >= "2.14"
"""The result of `aten.detach` has no partial norm (`_NormPartial`): torch reduces it first."""


def distributed_like(like: DTensor, local: torch.Tensor) -> DTensor:
    """Return a `DTensor` with the layout of `like`, of which `local` is this rank's part.

    `DTensor.from_local` would move it to the device of the mesh, but offloaded parts are on the host, as with FSDP's
    `CPUOffloadPolicy`.
    """
    meta, spec = TensorMeta(like.shape, like.stride(), local.dtype), like._spec
    if spec.tensor_meta != meta:
        spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def fake_like(
    tensor: torch.Tensor, mode: Any, *, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a tensor of a fake mode with the shape and strides of another; a `DTensor` keeps its placements.

    It requires a gradient if the other does, unless that is a `DTensor`.

    Args:
        tensor: The other tensor, of any shape and dtype.
        mode: A `FakeTensorMode`.
        device: The device of the result.
        dtype: The dtype of the result; None: that of `tensor`.
    """
    if isinstance(tensor, DTensor):
        return distributed_like(tensor, fake_like(tensor.to_local().detach(), mode, device=device, dtype=dtype))
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device)
        return fake.requires_grad_(tensor.requires_grad)


def replicated_value(value: DTensor) -> torch.Tensor:
    """Return the full tensor without autograd, also inside a rule for an op on a `DTensor`.

    There, `DTensor.full_tensor` fails on 2.11, which has no rule for the `detach_` of autograd's output.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    spec = value._spec
    target = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    full = redistribute_local_tensor(value._local_tensor, spec, target)
    return full.wait() if isinstance(full, AsyncCollectiveTensor) else full


def identity_of_parts(param: DTensor) -> tuple[int, int]:
    """Return the identity of the memory of a `DTensor` itself, and of its local tensor."""
    return param.untyped_storage()._cdata, id(param._local_tensor)


def strided_shard(dim: int, parts: int) -> Placement:
    """Return the placement of a dimension of `parts` equal pieces, each of which is split."""
    return _StridedShard(dim, split_factor=parts)


class _Watched:
    """A placement that is equal to a plain one, and calls methods of `operations`: see `watched`.

    Torch has no hook before `DTensor.full_tensor` and `redistribute`, and dispatches a subclass of `DTensor` slowly. It
    copies the placements of a parameter to its gradient, to detached tensors and to the state of most optimizers, and
    caches them by layout: of equal layouts, the first decides. Hence nothing here may depend on a model or a rank.
    """

    plain: Any
    operations: Any

    @property  # type: ignore[misc]  # torch.save writes the plain placement
    def __class__(self) -> Any:
        return type(self.plain)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.operations.pickling_shards()
        return self.plain.__reduce_ex__(protocol)

    def _to_replicate_tensor(self, local: torch.Tensor, mesh: Any, dim: int, shape: Any) -> torch.Tensor:
        with self.operations.gathering_shards(shape):
            return self.plain._to_replicate_tensor(local, mesh, dim, shape)

    def _to_new_shard_dim(self, local: torch.Tensor, mesh: Any, dim: int, shape: Any, to: int) -> torch.Tensor:
        with self.operations.gathering_shards(shape):
            return self.plain._to_new_shard_dim(local, mesh, dim, shape, to)


_WATCHED: Any = {kind: type(f"_Watched{kind.__name__}", (_Watched, kind), {}) for kind in (Shard, _StridedShard)}


def watched(placement: Any, operations: Any) -> Placement:
    """Return an equal placement that calls methods of `operations`, a replicated one unchanged.

    Args:
        placement: A placement of a parameter.
        operations: `gathering_shards(shape)` returns a context for a collective that sends this rank's shard of a
            tensor. `pickling_shards()` is called when one is pickled.
    """
    if type(placement) not in _WATCHED:
        return placement
    factor = {"split_factor": placement.split_factor} if isinstance(placement, _StridedShard) else {}
    made: Placement = _WATCHED[type(placement)](placement.dim, **factor)
    made.__dict__.update(plain=placement, operations=operations)
    return made

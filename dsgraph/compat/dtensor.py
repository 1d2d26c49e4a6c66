"""DTensor: its local tensor, specs and placements."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

LERPS_LISTS_OF_SHARDS = torch.__version__ >= "2.13"
"""`torch._foreach_lerp_` takes shards; the foreach step of Adafactor calls it."""

DETACH_REDUCES_NORMS = torch.__version__ >= "2.14"
"""The result of `aten.detach` has no partial norm (`_NormPartial`): torch reduces it first."""


def distributed_like(like: DTensor, local: torch.Tensor) -> DTensor:
    """Return a `DTensor` with the layout of `like`, of which `local` is this rank's part.

    `DTensor.from_local` would move it to the device of the mesh, but offloaded parts are on the host, as with FSDP's
    `CPUOffloadPolicy`.
    """
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
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
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)

"""A copy of a model without values, from which a forward in another dtype or mode is captured."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsgraph.compat.dtensor import fake_like
from dsgraph.compat.modules import dtypes_after
from dsgraph.compat.tensors import new_fake_mode
from dsgraph.utils.errors import PartitionError

from .captured_model import CapturedModel


def without_values(model: nn.Module, device: torch.device, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are fake: they have a device and take no memory.

    The forward of the copy takes the branches that the model takes on that device.

    Args:
        model: The model, on any device or on meta.
        device: The device of the copy.
        dtype: Dtype of the copy's floating-point parameters; None: that of the model's.

    Raises:
        PartitionError: The model cannot be copied, or keeps a parameter in another dtype.
    """
    kept = dtypes_after(model, dtype) if dtype is not None else {}
    for name, param in model.named_parameters():
        if param.is_floating_point() and kept.get(id(param), dtype) != dtype:
            raise PartitionError(
                f"pipeline: `_apply` keeps {name!r} {kept[id(param)]}: leave param_dtype out, or train without stages"
            )
    memo: dict[int, Any] = {}
    mode = new_fake_mode()
    for tensor in (*model.parameters(), *model.buffers()):
        is_parameter = isinstance(tensor, nn.Parameter)
        is_cast = dtype is not None and is_parameter and tensor.is_floating_point()
        fake = fake_like(tensor, mode, device=device, dtype=dtype if is_cast else tensor.dtype)
        memo[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # an attribute of any class
        raise PartitionError(
            f"pipeline: {type(model).__name__} cannot be copied, which evaluate, param_dtype and a model on another "
            f"device than its stages need: {error}"
        ) from error


def default_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """Return a context in which a forward makes tensors on a device: that of a copy of a model on another device.

    Args:
        device: The device; None leaves the default, with which Dynamo is three times faster.
    """
    return nullcontext() if device is None else device


def with_values(captured: CapturedModel, model: nn.Module) -> CapturedModel:
    """Return the capture of a copy with the values of the model: its parameters and buffers, or this rank's slices."""
    own: dict[str, Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in own.items():
        if isinstance(tensor, DTensor):
            own[name] = nn.Parameter(tensor.to_local().detach(), requires_grad=tensor.requires_grad)
    return replace(captured, state={node: (name, own[name]) for node, (name, _) in captured.state.items()})

"""A copy of a model without values, from which a forward in another dtype or mode is captured."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsgraph.utils.errors import PartitionError

from .captured_model import CapturedModel


def without_values(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a model on the meta device, which takes no memory for parameters and buffers.

    Args:
        model: The model.
        dtype: Dtype of the copy's floating-point parameters; None: that of the model's.

    Raises:
        PartitionError: The model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        is_cast = dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        like = tensor.detach().to("meta", dtype=dtype if is_cast else tensor.dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(like, requires_grad=tensor.requires_grad) if is_parameter else like
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # an attribute of any class
        raise PartitionError(
            f"pipeline: {type(model).__name__} cannot be copied, which evaluate and param_dtype need: {error}"
        ) from error


def with_values(captured: CapturedModel, model: nn.Module) -> CapturedModel:
    """Return the capture of a copy with the values of the model: its parameters and buffers, or this rank's slices."""
    own: dict[str, Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in own.items():
        if isinstance(tensor, DTensor):
            own[name] = nn.Parameter(tensor.to_local().detach(), requires_grad=tensor.requires_grad)
    return replace(captured, state={node: (name, own[name]) for node, (name, _) in captured.state.items()})

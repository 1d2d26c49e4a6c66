"""Brings the inputs of a model to its device, and to the dtype in which its forward sees parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from dsgraph.compat.dynamo import only_inlined
from dsgraph.compat.modules import hook_tables
from dsgraph.compat.tensors import map_tensors


def cast_floating(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Return inputs of a model with floating-point tensors cast to `dtype`; None leaves them unchanged.

    Tensors inside lists, tuples, dicts and other containers that `torch.utils._pytree` knows are cast as well.
    """
    if dtype is None:
        return inputs
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs)


def move_inputs(inputs: Any, device: torch.device) -> Any:
    """Return inputs of a model with CPU tensors moved to `device`.

    From pinned memory they are copied while the host goes on. Containers are those of `cast_floating`.
    """
    if device.type == "cpu":
        return inputs
    return map_tensors(
        lambda tensor: tensor.to(device, non_blocking=True) if tensor.device.type == "cpu" else tensor, inputs
    )


def cast_inputs_of(root: nn.Module, dtype: torch.dtype) -> None:
    """Make `root` cast its inputs before its other hooks run; a second call changes nothing.

    FSDP2's `MixedPrecisionPolicy(cast_forward_inputs=True)` does the same for the module that it is given.
    """
    hooks = [hook for table in hook_tables(root) for hook in table.values()]
    if not any(isinstance(hook, partial) and hook.func is _cast for hook in hooks):
        root.register_forward_pre_hook(partial(_cast, dtype=dtype), prepend=True, with_kwargs=True)


_cast_uncompiled = torch.compiler.disable(cast_floating)


def _cast(module: nn.Module, args: Any, kwargs: Any, *, dtype: torch.dtype) -> Any:
    # torch.compile runs hooks of the compiled model outside its graph, and would compile the casts by themselves.
    cast = cast_floating if torch.compiler.is_dynamo_compiling() else _cast_uncompiled
    return cast((args, kwargs), dtype)


only_inlined(_cast)

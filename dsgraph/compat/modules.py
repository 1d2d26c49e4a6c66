"""Modules: calls, hooks and `module.to`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.stateless import _reparametrize_module

from .tensors import keep_hooks

# What runs while a module is being called; its local `self` is the module.
MODULE_CALL = torch.nn.Module._call_impl.__code__

# What runs while an optimizer steps.
OPTIMIZER_STEP = torch.optim.Optimizer.profile_hook_step(len).__code__


def device_and_dtype(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and dtype that the arguments of `nn.Module.to` name; None for those not named."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def apply_to_tensors(
    kind: type[torch.nn.Module], module: torch.nn.Module, change: Callable[..., Any], recurse: bool = True
) -> torch.nn.Module:
    """Apply `change` to a module's tensors like class `kind` does, for `module.to`, `.double` and similar methods.

    If nothing would change, such as on the same device, nothing is done: torch would swap each `DTensor` even so, and
    could not once a compiled graph refers to it.
    """
    own = [value for value in (*module._parameters.values(), *module._buffers.values()) if value is not None]
    with torch.no_grad():
        is_same = kind._apply is torch.nn.Module._apply and all(change(value) is value for value in own)
    if not is_same:
        changed = kind._apply(module, change, recurse)
        for param in module._parameters.values():
            if param is not None:
                keep_hooks(param)
        return changed
    for child in module.children() if recurse else ():
        child._apply(change)
    return module


def dtypes_after(module: torch.nn.Module, dtype: torch.dtype) -> dict[int, torch.dtype]:
    """Return the dtype that `module.to(dtype)` would give each parameter, by id; nothing is changed.

    Empty if each module converts its parameters as torch does. A class may override `_apply` to keep float32.
    """
    torchs = (torch.nn.Module._apply, torch.nn.RNNBase._apply)
    before = [(child, dict(vars(child))) for child in module.modules()]
    if all(getattr(child._apply, "__func__", None) in torchs for child, _ in before):
        return {}
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    empty = {name: torch.empty(own.shape, dtype=own.dtype, device="meta") for name, own in tensors.items()}
    with _reparametrize_module(module, empty, tie_weights=True):  # which puts what the modules hold then into `empty`
        torch.nn.Module.to(module, dtype)
    for child, own in before:
        vars(child).update(own)
    return {id(tensors[name]): value.dtype for name, value in empty.items()}


def save_own_state(
    kind: type[torch.nn.Module], module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, keep_vars: bool
) -> None:
    """Save a module's own state as class `kind` does; `state_dict` calls this for each module."""
    kind._save_to_state_dict(module, state_dict, prefix, keep_vars)


def hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """Return a module's pre-hooks of `load_state_dict` and forward, and which of the latter take keywords."""
    return module._load_state_dict_pre_hooks, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs


def remove_hooks(module: torch.nn.Module) -> None:
    """Remove all hooks of a module's forward and backward."""
    for table in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        table.clear()

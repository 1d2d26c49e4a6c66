"""Restores a model if `partition` fails midway."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from dsgraph.compat.modules import hook_tables
from dsgraph.utils.errors import PartitionError, on_one_line

from .initialization.buffers import can_be_sent
from .parameter import ParameterState
from .state import PartitionedModule, PartitionState, partition_states


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """Restore modules, parameters, buffers and tables of `model` if the block raises an exception.

    Parameters are kept until the block ends if free memory is twice their size. If there is less, they are
    released one by one as they are replaced, and the error says that the model is lost.

    Args:
        model: The module to partition, which may be partly partitioned already.

    Raises:
        PartitionError: The block failed after a parameter was replaced that was not kept.
    """
    modules, keeps = list(model.modules()), _has_room(model)
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        yield  # `partition` refuses them before it changes anything
        return
    saved = [_SavedModule(module, keeps=keeps) for module in modules]
    tables = [_SavedTable(part) for part in partition_states(model)]
    written = (buffer for buffer in model.buffers() if keeps and not buffer.is_meta and can_be_sent(buffer))
    buffers = [(buffer, buffer.detach().clone()) for buffer in written]
    first = [id(param) for param in model.parameters()]
    try:
        yield
    except BaseException as error:
        lost = not keeps and [id(param) for param in model.parameters()] != first
        with torch.no_grad():
            for table in tables:
                table.restore()
            for module in saved:
                module.restore()
            for buffer, values in buffers:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
        if lost:
            raise PartitionError(
                f"partition failed midway ({on_one_line(error)}), and memory was too small to keep what it had "
                "replaced: build the model again before you go on"
            ) from error
        raise


def _has_room(model: nn.Module) -> bool:
    """Return True if free memory is at least twice the size of the parameters."""
    sizes: dict[torch.device, int] = {}
    for param in model.parameters():
        if not isinstance(param, nn.parameter.UninitializedParameter) and param.layout is torch.strided:
            sizes[param.device] = sizes.get(param.device, 0) + param.nbytes
    for device, size in sizes.items():
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2 * size:
            return False
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
        if device.type == "cpu" and free < 2 * size:
            return False
    return True


class _SavedModule:
    """The attributes of a module that `partition` changes."""

    def __init__(self, module: nn.Module, *, keeps: bool) -> None:
        self._module, self._class = module, type(module)
        self._parameters = dict(module._parameters) if keeps else None
        self._buffers = dict(module._buffers)
        self._hooks = [(hooks, dict(hooks)) for hooks in hook_tables(module)]
        held: PartitionedModule | None = module.__dict__.get("_dsgraph")
        self._held = held if held is None else (held, _fields_of(held))

    def restore(self) -> None:
        module = self._module
        module.__class__ = self._class
        if self._parameters is not None:
            module._parameters.update(self._parameters)
        module._buffers.update(self._buffers)
        for hooks, before in self._hooks:
            hooks.clear()
            hooks.update(before)
        if self._held is None:
            module.__dict__.pop("_dsgraph", None)
        else:
            held, values = self._held
            vars(held).update(values)


class _SavedTable:
    """A table that `partition` extends."""

    def __init__(self, part: PartitionState) -> None:
        self._part, self._fields = part, _fields_of(part)
        self._owners: list[tuple[ParameterState, list[Any]]] = [(e, list(e.owners)) for e in part.parameters]

    def restore(self) -> None:
        vars(self._part).update(self._fields)
        for entry, owners in self._owners:
            entry.owners = owners


def _fields_of(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, with copies of containers that are changed in place."""
    assert is_dataclass(item)
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    return {name: value.copy() if isinstance(value, (dict, list, set)) else value for name, value in values.items()}

"""Checkpoints of divided models: full tensors under the model's names, whatever the layout that wrote them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsgraph.errors import CheckpointError
from dsgraph.inductor_ext import resolve_group
from dsgraph.sharding.rows import own_part
from dsgraph.sharding.slices import ParameterSlice

_MODEL, _OPTIMIZER = "model", "optimizer"
OwnRows = Callable[[str, Tensor], Tensor]
"""Of a parameter's name and its slice: this rank's rows of that."""


def full_values(values: Mapping[str, Tensor], slices: Mapping[str, ParameterSlice]) -> dict[str, Tensor]:
    """The full tensors of which ranks hold shards and slices. All ranks of a stage call it together.

    Args:
        values: By name; shards are `DTensor`.
        slices: How those are sliced that are, by name.
    """
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        own = value.detach()
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        found[name] = (slices[name].full(whole) if name in slices else whole).clone()
    return found


def own_value(name: str, full: Tensor, slices: Mapping[str, ParameterSlice], rows: OwnRows) -> Tensor:
    """What this rank holds of a full tensor."""
    held = slices.get(name)
    return rows(name, full if held is None else held.own(full, resolve_group(held.group).rank()))


def save(
    folder: str | os.PathLike[str],
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    slices: Mapping[str, ParameterSlice],
) -> None:
    """Writes full parameters and the state of an optimizer by `torch.distributed.checkpoint`."""
    state: dict[str, Any] = {_MODEL: full_values(parameters, slices)}
    if optimizer is not None:
        state[_OPTIMIZER] = {name: _full_state(name, p, optimizer, slices) for name, p in parameters.items()}
    dcp.save(state, checkpoint_id=folder)


def _full_state(
    name: str, parameter: nn.Parameter, optimizer: Optimizer, slices: Mapping[str, ParameterSlice]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        is_like = isinstance(value, Tensor) and value.shape == parameter.shape
        found[key] = full_values({name: value}, slices)[name] if is_like else torch.as_tensor(value)
    return found


def load(
    folder: str | os.PathLike[str],
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    slices: Mapping[str, ParameterSlice],
    rows: OwnRows,
) -> None:
    """Reads what `save` wrote, in whatever layout.

    Raises:
        CheckpointError: The folder holds no such checkpoint, or not these parameters; nothing was changed.
    """
    try:
        known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except (OSError, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"load_checkpoint: {os.fspath(folder)!r} holds no checkpoint: {error}") from error
    missing = [name for name in parameters if f"{_MODEL}.{name}" not in known]
    if missing:
        raise CheckpointError(f"load_checkpoint: {os.fspath(folder)!r} has no {missing[0]!r}: it is of another model")
    state = {key: _empty(key, kept) for key, kept in known.items() if _is_read(key, parameters, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    with torch.no_grad():
        for name, parameter in parameters.items():
            own_part(parameter).copy_(own_value(name, state[f"{_MODEL}.{name}"], slices, rows))
    if optimizer is not None:
        _take_state(state, parameters, optimizer, slices, rows)


def _is_read(key: str, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None) -> bool:
    kind, _, name = key.partition(".")
    return name in parameters if kind == _MODEL else optimizer is not None and name.rpartition(".")[0] in parameters


def _empty(key: str, kept: Any) -> Tensor:
    if not isinstance(kept, TensorStorageMetadata):
        raise CheckpointError(f"load_checkpoint: {key!r} is no tensor")
    return torch.empty(kept.size, dtype=kept.properties.dtype)


def _take_state(
    state: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    slices: Mapping[str, ParameterSlice],
    rows: OwnRows,
) -> None:
    for key, value in state.items():
        kind, _, rest = key.partition(".")
        if kind != _OPTIMIZER:
            continue
        name, _, what = rest.rpartition(".")
        parameter = parameters[name]
        if value.ndim == 0:
            optimizer.state[parameter][what] = value
            continue
        own = own_value(name, value, slices, rows).to(parameter.device)
        optimizer.state[parameter][what] = _like(parameter, own)


def _like(parameter: nn.Parameter, own: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

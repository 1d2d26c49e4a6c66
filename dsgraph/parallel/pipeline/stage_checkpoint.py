"""Checkpoints of parallel models: full tensors under the model's names, whatever the layout that wrote them.

A checkpoint is a folder `<folder>/<tag>` like an engine's, with checksums of all files. A rank writes what its
stages hold. Nothing is changed by a load before all ranks have read and checked everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsgraph.checkpoint.checkpoint_files import check_tag, encode_about, read_about
from dsgraph.checkpoint.checkpoint_folder import Unfinished, find_tag
from dsgraph.inductor_ext import resolve_group
from dsgraph.partitioning.rows import own_part
from dsgraph.partitioning.transforms.slices import ParameterSlice
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.joint_failure import all_or_none, on_first
from dsgraph.utils.errors import CheckpointError

_MODEL, _OPTIMIZER, _KIND = "model", "optimizer", "parallel layout"
OwnRows = Callable[[str, Tensor], Tensor]
"""Of a parameter's name and its slice: this rank's rows of that."""


@dataclass(frozen=True)
class StageState:
    """The parameters and buffers of a rank's stages, and the names of those of all ranks.

    Attributes:
        parameters: This rank's parameters by name; shards are `DTensor`.
        buffers: This rank's buffers that the model saves.
        slices: How tensor-parallel parameters are sharded.
        rows: Return this rank's rows of a parameter.
        known: Shape and dtype of every parameter and saved buffer of the model that a stage reads; equal on all ranks.
        agreement: The agreement of all ranks.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    slices: Mapping[str, ParameterSlice]
    rows: OwnRows
    known: Mapping[str, str]
    agreement: Agreement

    def full(self, name: str, value: Tensor) -> Tensor:
        """Return the full tensor of a parameter, or of state of its shape. All ranks with a part of it call it."""
        own = value.detach()
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        return (self.slices[name].full(whole) if name in self.slices else whole).clone()

    def own(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor."""
        held = self.slices.get(name)
        return self.rows(name, full if held is None else held.own(full, resolve_group(held.group).rank()))


def save(
    folder: Path, tag: str, state: StageState, optimizer: Optimizer | None, more: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint. All ranks call it.

    Args:
        folder: Folder of checkpoints.
        tag: Name of the checkpoint, equal on all ranks.
        state: The state of the model to save.
        optimizer: Optimizer of the state's parameters.
        more: Values that `load` returns; `dsgraph.utils.typed_json.encode` takes them.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: It cannot be written; all ranks raise, and checkpoints that were there stay.
    """
    doing, agreement = f"save {folder / tag}", state.agreement
    tensors: dict[str, Any] = {}
    likes: dict[str, bool] = {}
    agreement.confirm("write checkpoints of different tags", [tag], advice="Give the same folder and tag on all ranks")

    def gather() -> None:
        check_tag(tag)
        tensors[_MODEL] = {name: state.full(name, value) for name, value in state.parameters.items()}
        tensors[_MODEL] |= {name: value.detach().clone() for name, value in state.buffers.items()}
        if optimizer is not None:
            tensors[_OPTIMIZER] = {
                name: _full_state(name, param, optimizer, state, likes) for name, param in state.parameters.items()
            }

    all_or_none(agreement, doing, gather)
    for text in agreement.exchange("which state has the shape of its parameter", json.dumps(likes)).values():
        likes.update(json.loads(text))
    about = {
        "kind": _KIND,
        "tensors": dict(state.known),
        "optimizer_class": None if optimizer is None else type(optimizer).__name__,
        "likes": likes,
        "more": dict(more or {}),
    }
    begun: list[Unfinished] = []  # of the first rank

    def begin() -> str:
        begun.append(Unfinished.begin(folder, tag))
        return begun[0].path.name

    def complete() -> None:
        for unfinished in begun:
            unfinished.complete(encode_about(about))

    unfinished = folder / str(on_first(agreement, doing, begin))
    try:
        try:
            dcp.save(tensors, checkpoint_id=unfinished)
        except (dcp.api.CheckpointException, OSError) as error:
            raise CheckpointError(f"{doing}: {error}") from error
        all_or_none(agreement, doing, complete)
    except BaseException:
        for failed in begun:
            failed.give_up()
        raise
    return folder / tag


def _full_state(
    name: str, parameter: nn.Parameter, optimizer: Optimizer, state: StageState, likes: dict[str, bool]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if value is None:
            continue
        is_like = isinstance(value, Tensor) and value.shape == parameter.shape
        is_part = name in state.slices or isinstance(parameter, DTensor)
        if isinstance(value, Tensor) and value.ndim and not is_like and is_part:
            raise CheckpointError(
                f"state {key!r} of {name!r} is {list(value.shape)} of {type(optimizer).__name__}, which other layouts "
                "cannot take: use an optimizer whose state has the shape of its parameter"
            )
        likes[f"{name}.{key}"] = is_like
        found[key] = state.full(name, value) if is_like else torch.as_tensor(value).clone()
    return found


def load(
    folder: Path, tag: str | None, state: StageState, optimizer: Optimizer | None
) -> tuple[str, dict[str, Any]] | None:
    """Load what `save` wrote, from any layout. All ranks call it.

    Args:
        folder: Folder of checkpoints.
        tag: Which one; None: the newest.
        state: The state of the model to load into.
        optimizer: Optimizer of the state's parameters; None: its state is not loaded.

    Returns:
        The tag and the argument `more` of `save`; None if there is no checkpoint and no tag was given.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or of another model or optimizer. All ranks raise;
            nothing was changed.
    """
    agreement = state.agreement
    agreement.confirm("load different checkpoints", [str(tag)], advice="Give the same folder and tag on all ranks")
    found = on_first(agreement, f"load {folder}", lambda: find_tag(folder, tag))
    if found is None:
        return None
    path = folder / found
    doing, read, ready = f"load {path}", dict[str, Any](), list[Callable[[], None]]()

    def look() -> None:
        about = read_about(path, share=dist.get_rank(), shares=dist.get_world_size())
        _check(about, state, optimizer)
        known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        read["about"] = about
        read["tensors"] = {key: _empty(key, kept) for key, kept in known.items() if _is_read(key, state, optimizer)}

    all_or_none(agreement, doing, look)
    try:
        dcp.load(read["tensors"], checkpoint_id=path)
    except (dcp.api.CheckpointException, OSError) as error:
        raise CheckpointError(f"{doing}: {error}") from error
    all_or_none(agreement, doing, lambda: ready.extend(_writes(read["tensors"], read["about"], state, optimizer)))
    with torch.no_grad():
        for write in ready:
            write()
    return found, read["about"]["more"]


def _check(about: Mapping[str, Any], state: StageState, optimizer: Optimizer | None) -> None:
    """Check that a checkpoint is of this model: the same names, shapes and dtypes."""
    if about.get("kind") != _KIND:
        raise CheckpointError("it is no checkpoint of a parallel layout")
    saved, mine = about["tensors"], state.known
    for name in mine:
        if name not in saved:
            raise CheckpointError(f"it has no {name!r}, which the model has: it is of another model")
        if saved[name] != mine[name]:
            raise CheckpointError(f"{name!r} is {saved[name]} in it, and {mine[name]} in the model")
    for name in saved:
        if name not in mine:
            raise CheckpointError(f"it has {name!r}, which the model has not: it is of another model")
    wanted = None if optimizer is None else type(optimizer).__name__
    if wanted is not None and about["optimizer_class"] != wanted:
        raise CheckpointError(
            f"it was saved with optimizer={about['optimizer_class']}, and is loaded with {wanted}: use that one, or "
            "leave optimizer out"
        )


def _is_read(key: str, state: StageState, optimizer: Optimizer | None) -> bool:
    kind, _, name = key.partition(".")
    if kind == _MODEL:
        return name in state.parameters or name in state.buffers
    return optimizer is not None and name.rpartition(".")[0] in state.parameters


def _empty(key: str, kept: Any) -> Tensor:
    if not isinstance(kept, TensorStorageMetadata):
        raise CheckpointError(f"{key!r} is no tensor")
    return torch.empty(kept.size, dtype=kept.properties.dtype)


def _writes(
    tensors: Mapping[str, Tensor], about: Mapping[str, Any], state: StageState, optimizer: Optimizer | None
) -> list[Callable[[], None]]:
    """Return functions that copy the loaded tensors into place; they have been checked."""
    found: list[Callable[[], None]] = []
    for name, target in {**state.buffers, **state.parameters}.items():
        full = tensors.get(f"{_MODEL}.{name}")
        if full is None:
            raise CheckpointError(f"{name!r} is missing in its files")
        own = state.own(name, full) if name in state.parameters else full
        if own.shape != own_part(target).shape:
            raise CheckpointError(f"{name!r} is {list(own.shape)} in it, and {list(own_part(target).shape)} here")
        found.append(partial(_copy, target, own))
    if optimizer is None:
        return found
    states: dict[str, dict[str, Tensor]] = {name: {} for name in state.parameters}
    for key, value in tensors.items():
        kind, _, rest = key.partition(".")
        if kind == _OPTIMIZER:
            name, _, what = rest.rpartition(".")
            states[name][what] = _own_state(state, name, value, is_like=about["likes"].get(rest, value.ndim > 0))
    for name, parameter in state.parameters.items():
        found.append(partial(_replace_state, optimizer, parameter, states[name]))
    return found


def _copy(target: Tensor, own: Tensor) -> None:
    own_part(target.detach()).copy_(own)


def _replace_state(optimizer: Optimizer, parameter: nn.Parameter, values: dict[str, Tensor]) -> None:
    optimizer.state.pop(parameter, None)
    if values:
        optimizer.state[parameter].update(values)


def _own_state(state: StageState, name: str, value: Tensor, *, is_like: bool) -> Tensor:
    if not is_like:
        return value
    parameter = state.parameters[name]
    own = state.own(name, value).to(parameter.device)
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

"""Load a checkpoint into an engine, or into a model; `save.py` defines its content.

Everything is read and checked, on all ranks, before anything changes: files by their checksums, the content of
`engine.json`, then tensors, which are read into copies. If parameters or the optimizer's state are on disk, no copies
are made: the metadata of the checkpoint is checked first, and then each tensor is read into its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim import Optimizer

from dsgraph.optim.hooks import hooks_of
from dsgraph.ranks.first_rank import print_notes
from dsgraph.ranks.joint_failure import all_or_none, on_first, reason
from dsgraph.utils.errors import CheckpointError, OffloadError

from .checkpoint_files import read_about
from .checkpoint_folder import find_tag
from .checkpoint_match import MODEL_ALONE, other_model, other_optimizer, why_damaged
from .disk_planners import loading_to_disk
from .model_tensors import ModelTensors
from .save import Training


def load(training: Training, folder: Path, tag: str | None, *, module_only: bool) -> tuple[Path, dict[str, Any]] | None:
    """Load a checkpoint. All ranks call it together.

    Args:
        training: The engine or model to load into: the same model, in any layout, at any stage, on any number of ranks.
        folder: Folder of checkpoints.
        tag: Tag of the checkpoint; None: the latest.
        module_only: True loads only the model.

    Returns:
        The checkpoint's folder and the client's state; None if there is no checkpoint and no tag was given.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or of another model. Nothing is changed, except
            as `read_into` says.
    """
    agreement = training.agreement
    found = on_first(agreement, f"load {folder}", lambda: find_tag(folder, tag))
    if found is None:
        print_notes(f"load_checkpoint: {folder} holds no checkpoint, and nothing is loaded")
        return None
    path, doing = folder / found, f"load {folder / found}"
    tensors, optimizer = training.tensors(), training.optimizer
    in_place = is_on_disk(tensors, optimizer, module_only=module_only)
    about, wanted, random = dict[str, Any](), dict[str, Any](), dict[str, Tensor]()

    def check() -> None:
        problem = why_damaged(about) or ("" if module_only else _why_not(training, about))
        if problem:
            raise CheckpointError(problem)
        known = _known(path, tensors, module_only=module_only)
        wanted.update(_model_to_read(tensors, known, in_place=in_place))
        if not module_only:
            wanted.update(_optimizer_to_read(tensors, optimizer, known))
            random.update(_random_states(path, about, tensors))

    all_or_none(agreement, doing, lambda: about.update(_own_share(path)))
    all_or_none(agreement, doing, check)  # after all files have passed their checksums
    reader = dcp.FileSystemReader(path)
    read_into(wanted, reader, tensors, doing=doing, optimizer=optimizer, module_only=module_only, in_place=in_place)
    if not module_only:
        all_or_none(agreement, doing, lambda: training.take_schedule(about["engine"]))
    if not in_place:
        _take_model(tensors, wanted)
    if not module_only:
        _take_optimizer(tensors, optimizer, wanted, about)
        training.go_on_from(about["engine"])
        for device, state in random.items():
            (torch.cuda.set_rng_state if device == "cuda" else torch.set_rng_state)(state)
    return path, about["client_state"]


def _own_share(path: Path) -> dict[str, Any]:
    """Return the content of `engine.json` after checking this rank's share of the files."""
    return read_about(path, share=dist.get_rank(), shares=dist.get_world_size())


def _why_not(training: Training, about: dict[str, Any]) -> str:
    """Return why the parts of a checkpoint besides the model cannot be loaded; empty if they can."""
    groups = [] if training.optimizer is None else training.optimizer.param_groups
    problem = other_optimizer(training.optimizer, about) or training.why_not(about["engine"])
    if len(groups) != len(about["groups"]):
        problem = f"it has {len(about['groups'])} groups of parameters, and the optimizer {len(groups)}"
    return f"{problem}: {MODEL_ALONE}" if problem else ""


def _random_states(path: Path, about: dict[str, Any], tensors: ModelTensors) -> dict[str, Tensor]:
    """Return the random states by device; empty if the layout has changed: tensor-parallel ranks need equal ones."""
    if about.get("layout", {"dp": about["ranks"], "tp": 1, "pp": 1}) != tensors.layout:
        return {}
    found: dict[str, Tensor] = torch.load(path / f"random-{dist.get_rank()}.pt", weights_only=True)
    return {device: state for device, state in found.items() if device != "cuda" or torch.cuda.is_available()}


def is_on_disk(tensors: ModelTensors, optimizer: Optimizer | None, *, module_only: bool) -> bool:
    """Return True if something to read is on disk: alike on all ranks, also on one that has no rows of it."""
    return tensors.is_on_disk or (hooks_of(optimizer).has_state_on_disk and not module_only)


def read_into(
    wanted: dict[str, Any],
    reader: dcp.StorageReader,
    tensors: ModelTensors,
    *,
    doing: str,
    optimizer: Optimizer | None,
    module_only: bool,
    in_place: bool,
) -> None:
    """Read tensors by name. All ranks call it together. `in_place` is the result of `is_on_disk`.

    Raises:
        CheckpointError: One could not be read. If they are copies, nothing was changed; if something is on disk,
            training is refused until a load succeeds.
    """
    try:
        if not in_place:
            dcp.load(wanted, storage_reader=reader)
            return
        with loading_to_disk(list(tensors.parameters.values()), optimizer, module_only=module_only) as planner:
            dcp.load(wanted, storage_reader=reader, planner=planner)
    except (dcp.api.CheckpointException, OffloadError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{doing}: {reason(error)}") from error


def _known(path: Path, tensors: ModelTensors, *, module_only: bool) -> dict[str, Any]:
    """Return the metadata of each tensor of a checkpoint, if they are those of the model."""
    tensors.refuse_slices_on_disk()
    known = dict(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    problem, left = other_model(tensors, known, module_only=module_only)
    if problem:
        raise CheckpointError(f"it is of another model: {problem}")
    if left:
        print_notes(f"load {path}: the model has none of {', '.join(left)}, which stay there")
    return known


def _model_to_read(tensors: ModelTensors, known: dict[str, Any], *, in_place: bool) -> dict[str, Tensor]:
    """Return the tensors that the model is read into: its own if something is on disk, otherwise copies."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.values.items():
        if isinstance(value, Tensor) and (name not in tensors.tied or f"model.{name}" in known):
            found[f"model.{name}"] = value if in_place else tensors.empty(name, value)
    return found


def _optimizer_to_read(tensors: ModelTensors, optimizer: Optimizer | None, known: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that the optimizer's state is read into."""
    found: dict[str, Tensor] = {}
    own_keys = hooks_of(optimizer).own_keys
    for name, param in tensors.parameters.items():
        prefix = f"optimizer.{name}."
        saved_as = {key: tensors.saved_key(name, key, own_keys) for key in _state_keys(prefix, known)}
        saved = {key: known[f"{prefix}{there}"] for key, there in saved_as.items() if f"{prefix}{there}" in known}
        state = _state_to_read(tensors, optimizer, name, param, saved)
        found |= {f"{prefix}{saved_as[key]}": value for key, value in state.items()}
    return found


def _state_keys(prefix: str, names: Iterable[str]) -> dict[str, None]:
    """Return the keys of the optimizer's state of a parameter among saved names, see `ModelTensors.saved_key`."""
    keys = [name[len(prefix) :] for name in names if name.startswith(prefix)]
    return dict.fromkeys(key.partition("@")[0] for key in keys if "." not in key)


def _state_to_read(
    tensors: ModelTensors, optimizer: Optimizer | None, name: str, param: Tensor, saved: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the tensors that the state of a parameter is read into, by key."""
    hooks = hooks_of(optimizer)
    if hooks.owns(param) is False:  # another rank stores it
        return {}
    on_disk = hooks.state_on_disk(param) if saved else {}
    if not on_disk.keys() <= saved.keys():
        lacks = next(key for key in on_disk if key not in saved)
        raise CheckpointError(f"there is no {lacks!r} of {name} in it: {MODEL_ALONE}")
    found: dict[str, Tensor] = {}
    for key, about in saved.items():
        empty, is_sliced = on_disk.get(key), tensors.is_sliced(name, about.size)
        if empty is not None and is_sliced:
            raise CheckpointError(
                f"optimizer state {key!r} of {name} is on disk, and this rank has a slice of it, which cannot be read "
                f"to disk yet: load it into an engine without offload_optimizer, or {MODEL_ALONE}"
            )
        if is_sliced:
            empty = torch.empty(about.size, dtype=about.properties.dtype)
        elif empty is None:
            empty = hooks.empty_state(param, key, about.size, about.properties.dtype)
        if empty is not None:
            found[key] = empty
    return found


def _take_model(tensors: ModelTensors, state: dict[str, Any]) -> None:
    prefix = "model."
    found = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    found |= {name: tensors.own(name, found[name]) for name in tensors.slices if name in found}
    for name, first in tensors.tied.items():
        if name in tensors.values:
            found.setdefault(name, found[first])  # a checkpoint made of safetensors has one of them
    tensors.put(found)


def _move_step(state: dict[str, Any]) -> None:
    """Move the step count of a parameter to the device of the rest of its state: a fused optimizer reads it there."""
    devices = [value.device for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    if devices and isinstance(state.get("step"), Tensor):
        state["step"] = state["step"].to(devices[0])


def _take_optimizer(
    tensors: ModelTensors, optimizer: Optimizer | None, state: dict[str, Any], about: dict[str, Any]
) -> None:
    assert optimizer is not None, "without one, only the model is loaded"
    hooks = hooks_of(optimizer)
    on_device = {
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    optimizer.state.clear()  # a checkpoint of an optimizer that has not stepped holds none
    for name, param in tensors.parameters.items():
        found = dict(about["optimizer"].get(name, {}))
        prefix = f"optimizer.{name}."
        for key in _state_keys(prefix, state):
            value = state[f"{prefix}{tensors.saved_key(name, key, hooks.own_keys)}"]
            found[key] = tensors.own(name, value) if tensors.is_sliced(name, value.shape) else value
        if param in on_device:
            _move_step(found)
        if found:
            hooks.take_state(optimizer.state, param, found)
    for group, saved in zip(optimizer.param_groups, about["groups"], strict=True):
        for key, value in saved.items():
            own = group.get(key)
            if isinstance(own, Tensor):
                own.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(own, tuple) else value
    hooks.after_load()

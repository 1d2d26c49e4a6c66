"""Load a checkpoint into an engine; `save.py` defines its content.

Everything is read and checked, on all ranks, before anything of the engine changes: files by their checksums, what
`engine.json` says, then tensors, which are read into copies. Where parameters or the
optimizer's state lie on disk, no copies are made: what can be known of a checkpoint is checked first, and then each
tensor is read into its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from dsgraph.optim.hooks import hooks_of
from dsgraph.partitioning.state import partition_states
from dsgraph.utils.errors import CheckpointError, OffloadError

from .checkpoint_files import read_about
from .checkpoint_folder import find_tag
from .checkpoint_match import other_model, other_optimizer, why_damaged
from .disk_planners import loading_to_disk
from .on_all_ranks import on_first, reason, together
from .save import Training
from .weight_files import describe


class HasTensors(Protocol):
    """What tensors are read into: an engine.

    Attributes:
        module: The partitioned model.
        optimizer: Of its shards.
    """

    module: nn.Module
    optimizer: Optimizer


def load(engine: Training, folder: Path, tag: str | None, *, module_only: bool) -> tuple[Path, dict[str, Any]] | None:
    """Reads a checkpoint into an engine. All ranks call it together.

    Args:
        engine: Of the same model; stage and number of ranks may be others.
        folder: Where checkpoints are.
        tag: Which one; None: the latest.
        module_only: Whether to leave optimizer, schedule, scale and counts as they are.

    Returns:
        Its folder and the client's state; None where there is no checkpoint and no tag was given.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or of another model; the engine is as it was,
            see `read_into`.
    """
    found = on_first(engine.module, f"load {folder}", lambda: find_tag(folder, tag))
    if found is None:
        if dist.get_rank() == 0:
            print(f"dsgraph: load_checkpoint: {folder} holds no checkpoint, and the engine stays as it is", flush=True)
        return None
    path, doing = folder / found, f"load {folder / found}"
    about, wanted, random = dict[str, Any](), dict[str, Any](), dict[str, Tensor]()

    def check() -> None:
        problem = why_damaged(about) or ("" if module_only else _why_not(engine, about))
        if problem:
            raise CheckpointError(problem)
        wanted.update(_wanted(engine, path, module_only=module_only))
        if not module_only:
            random.update(_random_states(path, about))

    share = {"share": dist.get_rank(), "shares": dist.get_world_size()}
    together(engine.module, doing, lambda: about.update(read_about(path, **share)))
    together(engine.module, doing, check)  # after all files have passed their checksums
    read_into(wanted, dcp.FileSystemReader(path), engine, doing=doing, module_only=module_only)
    if not module_only:
        together(engine.module, doing, lambda: engine.take_schedule(about["engine"]))
    if not is_on_disk(engine, module_only=module_only):
        _take_model(engine, wanted)
    if not module_only:
        _take_rest(engine, wanted, about)
        for device, state in random.items():
            (torch.cuda.set_rng_state if device == "cuda" else torch.set_rng_state)(state)
    return path, about["client_state"]


def _why_not(engine: Training, about: dict[str, Any]) -> str:
    """Return why an engine cannot load the parts of a checkpoint besides the model; empty if it can."""
    groups, saved = len(engine.optimizer.param_groups), len(about["groups"])
    problem = other_optimizer(engine.optimizer, about) or engine.why_not(about["engine"])
    if groups != saved:
        return f"it has {saved} groups of parameters, and the optimizer {groups}"
    return f"{problem}: load_module_only=True takes the model alone" if problem else ""


def _random_states(path: Path, about: dict[str, Any]) -> dict[str, Tensor]:
    """Return the random states by device; empty if the number of ranks has changed, which makes them useless."""
    if about["ranks"] != dist.get_world_size():
        return {}
    found: dict[str, Tensor] = torch.load(path / f"random-{dist.get_rank()}.pt", weights_only=True)
    return {device: state for device, state in found.items() if device != "cuda" or torch.cuda.is_available()}


def is_on_disk(engine: HasTensors, *, module_only: bool) -> bool:
    """Whether something lies on disk of what is read: alike on all ranks, also on one that has no rows of it."""
    entries = (entry for part in partition_states(engine.module) for entry in part.parameters)
    has_state = hooks_of(engine.optimizer).has_state_on_disk and not module_only
    return has_state or any(entry.stored is not None for entry in entries)


def read_into(
    wanted: dict[str, Any], reader: dcp.StorageReader, engine: HasTensors, *, doing: str, module_only: bool
) -> None:
    """Reads tensors by name. All ranks call it together.

    Raises:
        CheckpointError: One could not be read. Where they are copies, the engine is as it was; where something lies on
            disk, it trains no more until it has loaded.
    """
    try:
        if not is_on_disk(engine, module_only=module_only):
            dcp.load(wanted, storage_reader=reader)
            return
        with loading_to_disk(engine.module, engine.optimizer, module_only=module_only) as planner:
            dcp.load(wanted, storage_reader=reader, planner=planner)
    except (dcp.api.CheckpointException, OffloadError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{doing}: {reason(error)}") from error


def _wanted(engine: Training, path: Path, *, module_only: bool) -> dict[str, Any]:
    """Tensors to read into: the engine's own where something lies on disk, else copies."""
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tied = describe(engine.module)["tied"]
    problem, left = other_model(engine.module, known, tied, module_only=module_only)
    if problem:
        raise CheckpointError(f"it is of another model: {problem}")
    if left and dist.get_rank() == 0:
        print(f"dsgraph: load {path}: the model has none of {', '.join(left)}, which stay there", flush=True)
    in_place = is_on_disk(engine, module_only=module_only)
    state: dict[str, Any] = {
        f"model.{name}": value if in_place else torch.empty_like(value)
        for name, value in engine.module.state_dict().items()
        if isinstance(value, Tensor) and (name not in tied or f"model.{name}" in known)
    }
    if module_only:
        return state
    for name, param in engine.module.named_parameters():
        prefix = f"optimizer.{name}."
        saved = {key[len(prefix) :]: about for key, about in known.items() if key.startswith(prefix)}
        saved = {key: about for key, about in saved.items() if "." not in key}
        state |= {
            f"{prefix}{key}": value for key, value in _state_to_read(engine.optimizer, name, param, saved).items()
        }
    return state


def _state_to_read(optimizer: Any, name: str, param: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
    """What the state of a parameter is read into, by key, of what a checkpoint has of it."""
    hooks = hooks_of(optimizer)
    if hooks.owns(param) is False:  # another rank stores it
        return {}
    on_disk = hooks.state_on_disk(param) if saved else {}
    if not on_disk.keys() <= saved.keys():
        lacks = next(key for key in on_disk if key not in saved)
        raise CheckpointError(f"there is no {lacks!r} of {name} in it: load_module_only=True takes the model alone")
    found: dict[str, Tensor] = {}
    for key, about in saved.items():
        empty = on_disk.get(key)
        if empty is None:
            empty = hooks.empty_state(param, key, about.size, about.properties.dtype)
        if empty is not None:
            found[key] = empty
    return found


def _take_model(engine: Training, state: dict[str, Any]) -> None:
    prefix = "model."
    found = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    for name, first in describe(engine.module)["tied"].items():
        found.setdefault(name, found[first])  # a checkpoint made of safetensors has one of them
    engine.module.load_state_dict(found)


def _take_rest(engine: Training, state: dict[str, Any], about: dict[str, Any]) -> None:
    hooks = hooks_of(engine.optimizer)
    engine.optimizer.state.clear()  # a checkpoint of an optimizer that has not stepped holds none
    for name, param in engine.module.named_parameters():
        found = {**dict(_of_parameter(state, name)), **about["optimizer"].get(name, {})}
        if found:
            hooks.take_state(engine.optimizer.state, param, found)
    for group, saved in zip(engine.optimizer.param_groups, about["groups"], strict=True):
        for key, value in saved.items():
            own = group.get(key)
            if isinstance(own, Tensor):
                own.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(own, tuple) else value
    hooks.after_load()
    engine.go_on_from(about["engine"])


def _of_parameter(state: dict[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    prefix = f"optimizer.{name}."
    for key, value in state.items():
        if key.startswith(prefix) and "." not in key[len(prefix) :]:
            yield key[len(prefix) :], value

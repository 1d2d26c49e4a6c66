"""Checkpoints of an engine: written beside the last good one and renamed, so that no interruption loses it.

A checkpoint is a folder `<dir>/<tag>`. torch.distributed.checkpoint writes the tensors, each rank its own rows, and
reads them on any number of ranks, at any stage. `engine.json` has everything else as JSON, and a checksum of each file.
The file `<dir>/latest` names the newest; it is replaced last.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from dsgraph.checkpoint_files import (
    FORMAT,
    check_tag,
    complete,
    latest_tag,
    make_unfinished,
    read_about,
    unfinished_folder,
)
from dsgraph.errors import CheckpointError
from dsgraph.files import write_whole
from dsgraph.offload.saving import SavePlannerFromDisk

from .asynchronous import Writer
from .checkpoint_match import class_of, other_model, other_optimizer
from .compressing import CompressingOptimizer
from .together import reason, together
from .weight_files import describe


class Training(Protocol):
    """What a checkpoint is of: an engine.

    Attributes:
        module: The partitioned model.
        optimizer: The optimizer of its shards.
    """

    module: nn.Module
    optimizer: Optimizer

    @property
    def config(self) -> Any:
        """The configuration, which the checkpoint repeats."""

    def progress(self) -> dict[str, Any]:
        """What there is besides tensors, as JSON values."""

    def why_not(self, progress: Mapping[str, Any]) -> str:
        """Why `go_on_from` cannot take that over; empty where it can."""

    def go_on_from(self, progress: Mapping[str, Any]) -> None:
        """Takes over what `progress` gave in another run."""


def save(
    engine: Training, folder: Path, tag: str, client_state: dict[str, Any], *, writer: Writer | None = None
) -> Path:
    """Writes a checkpoint. All ranks call it at the same point.

    Args:
        engine: What it is of.
        folder: Folder of checkpoints.
        tag: Name of this one.
        client_state: What `load` gives back.
        writer: Writes it while training goes on; None: it is complete on return.

    Returns:
        Its folder.

    Raises:
        CheckpointError: The tag or the client's state cannot be written, or a rank's disk refused; the checkpoint
            before stays the latest.
    """
    final, unfinished = folder / check_tag(tag), unfinished_folder(folder, tag)
    is_first, doing, about, tensors = dist.get_rank() == 0, f"save {final}", dict[str, Any](), dict[str, Any]()
    together(
        engine.module, doing, lambda: (about.update(_about(engine, client_state)), tensors.update(_tensors(engine)))
    )
    together(engine.module, doing, lambda: make_unfinished(folder, tag) if is_first else None)
    together(engine.module, doing, lambda: _write_rank(engine, unfinished))
    if writer is None:
        planner = SavePlannerFromDisk(engine.optimizer)
        _written(doing, folder, lambda: dcp.save(tensors, storage_writer=_writing(unfinished), planner=planner))
        together(engine.module, doing, lambda: complete(folder, tag, about) if is_first else None)
        return final
    written = dcp.async_save(tensors, storage_writer=_writing(unfinished), process_group=writer.group())
    assert isinstance(written, Future), "of a stager of one's own it would be more"

    def end() -> None:
        _written(doing, folder, written.result)
        if is_first:  # dcp lets it know when the others have written
            complete(folder, tag, about)

    writer.start(doing, end)
    return final


def _writing(folder: Path) -> dcp.FileSystemWriter:
    """Writes one file while it serializes the other."""
    return dcp.FileSystemWriter(folder, thread_count=2)


def _written(doing: str, folder: Path, write: Callable[[], Any]) -> None:
    """Lets torch write the tensors, which it plans with the other ranks: it raises on all of them."""
    try:
        write()
    except (dcp.api.CheckpointException, OSError) as error:
        free = shutil.disk_usage(folder).free
        raise CheckpointError(f"{doing}: {reason(error)}; {free:,} bytes are free there") from error


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
        CheckpointError: There is no such checkpoint, it is damaged, or of another model; the engine is as it was.
    """
    named = [latest_tag(folder) if tag is None else tag]
    dist.broadcast_object_list(named, src=0)  # one rank chooses, lest folders of several hosts differ
    (tag,) = named
    if tag is None:
        if dist.get_rank() == 0:
            print(f"dsgraph: load_checkpoint: {folder} holds no checkpoint, and the engine stays as it is", flush=True)
        return None
    path, about = folder / tag, {}
    share = {"share": dist.get_rank(), "shares": dist.get_world_size()}
    together(engine.module, f"load {path}", lambda: about.update(read_about(path, **share)))
    groups, saved = len(engine.optimizer.param_groups), len(about["groups"])
    if groups != saved and not module_only:
        raise CheckpointError(f"load {path}: it has {saved} groups of parameters, and the optimizer {groups}")
    problem = "" if module_only else other_optimizer(engine.optimizer, about) or engine.why_not(about["engine"])
    if problem:
        raise CheckpointError(f"load {path}: {problem}: load_module_only=True takes the model alone")
    wanted = _wanted(engine, path, module_only=module_only)
    try:
        dcp.load(wanted, checkpoint_id=path)
    except (dcp.api.CheckpointException, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"load {path}: {reason(error)}") from error
    _take_model(engine, wanted)
    if not module_only:
        _take_rest(engine, wanted, about, path)
    return path, about["client_state"]


def _about(engine: Training, client_state: dict[str, Any]) -> dict[str, Any]:
    """What `engine.json` says of an engine."""
    try:
        client = json.loads(json.dumps(client_state))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"client_state: {error}; it takes what JSON can hold") from None
    return {
        "format": FORMAT,
        "ranks": dist.get_world_size(),
        "engine": engine.progress(),
        **_plain_state(engine),
        "optimizer_class": class_of(engine.optimizer),
        "client_state": client,
        "config": engine.config.model_dump(mode="json"),
        "model": describe(engine.module),
    }


def _write_rank(engine: Training, folder: Path) -> None:
    """What is each rank's own: the state of its random numbers."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    content = io.BytesIO()  # of a full disk, torch's own writer would say no more than "unexpected pos"
    torch.save(states, content)
    write_whole(folder / f"random-{dist.get_rank()}.pt", content.getvalue())


def _tensors(engine: Training) -> dict[str, Any]:
    """All tensors of model and optimizer, by names that say which parameter they belong to."""
    state = {f"model.{name}": value for name, value in engine.module.state_dict().items()}
    for name, key, value in _optimizer_state(engine):
        if isinstance(value, Tensor):
            state[f"optimizer.{name}.{key}"] = value
    return state


def _plain_state(engine: Training) -> dict[str, Any]:
    """What the optimizer holds besides tensors: of its parameters, and in its groups.

    Raises:
        CheckpointError: The model or the optimizer holds something that neither tensors nor JSON can say.
    """
    for name, value in engine.module.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} of the model is a {type(value).__name__}, which a checkpoint does not hold")
    plain: dict[str, dict[str, Any]] = {}
    for name, key, value in _optimizer_state(engine):
        if not isinstance(value, Tensor):
            plain.setdefault(name, {})[key] = _plain(value, f"optimizer state {key!r} of {name}")
    groups = [
        {key: _plain(value, f"{key!r} of the optimizer") for key, value in group.items() if key != "params"}
        for group in engine.optimizer.param_groups
    ]
    return {"groups": groups, "optimizer": plain}


def _optimizer_state(engine: Training) -> Iterator[tuple[str, str, Any]]:
    for name, param in engine.module.named_parameters():
        for key, value in engine.optimizer.state.get(param, {}).items():
            yield name, key, value


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:  # a learning rate that a recorded graph reads
        return value.item()
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise CheckpointError(f"{what} is a {type(value).__name__}, which a checkpoint does not hold") from None


def _wanted(engine: Training, path: Path, *, module_only: bool) -> dict[str, Any]:
    """Tensors to read into: copies, so that nothing of the engine changes until all is there."""
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tied = describe(engine.module)["tied"]
    problem, left = other_model(engine.module, known, tied, module_only=module_only)
    if problem:
        raise CheckpointError(f"load {path}: it is of another model: {problem}")
    if left and dist.get_rank() == 0:
        print(f"dsgraph: load {path}: the model has none of {', '.join(left)}, which stay there", flush=True)
    state: dict[str, Any] = {
        f"model.{name}": torch.empty_like(value)
        for name, value in engine.module.state_dict().items()
        if isinstance(value, Tensor) and (name not in tied or f"model.{name}" in known)
    }
    if module_only:
        return state
    owns = getattr(engine.optimizer, "owns", None)
    empty_state = getattr(engine.optimizer, "empty_state", None)
    for name, param in engine.module.named_parameters():
        for key, about in known.items():
            if key.startswith(f"optimizer.{name}.") and "." not in key[len(f"optimizer.{name}.") :]:
                size, dtype = about.size, about.properties.dtype  # type: ignore[union-attr]
                is_whole = owns(param) if owns is not None else None
                if is_whole is False:  # another rank keeps it
                    continue
                if empty_state is not None:
                    empty = empty_state(param, key.rpartition(".")[2], size)
                    if empty is not None:
                        state[key] = empty
                    continue
                like = is_whole is None and size == param.shape and len(size) > 0
                state[key] = torch.empty_like(param, dtype=dtype) if like else torch.empty(size, dtype=dtype)
    return state


def _take_model(engine: Training, state: dict[str, Any]) -> None:
    prefix = "model."
    found = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    for name, first in describe(engine.module)["tied"].items():
        found.setdefault(name, found[first])  # a checkpoint made of safetensors has one of them
    engine.module.load_state_dict(found)


def _take_rest(engine: Training, state: dict[str, Any], about: dict[str, Any], path: Path) -> None:
    engine.optimizer.state.clear()  # a checkpoint of an optimizer that has not stepped holds none
    for name, param in engine.module.named_parameters():
        found = {**dict(_of_parameter(state, name)), **about["optimizer"].get(name, {})}
        if found:
            engine.optimizer.state[param] = found
    for group, saved in zip(engine.optimizer.param_groups, about["groups"], strict=True):
        for key, value in saved.items():
            own = group.get(key)
            if isinstance(own, Tensor):
                own.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(own, tuple) else value
    if isinstance(engine.optimizer, CompressingOptimizer):
        engine.optimizer.go_on()
    engine.go_on_from(about["engine"])
    random = path / f"random-{dist.get_rank()}.pt"
    if about["ranks"] == dist.get_world_size():  # with others, no rank goes on where one left off
        states = torch.load(random, weights_only=True)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


def _of_parameter(state: dict[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    prefix = f"optimizer.{name}."
    for key, value in state.items():
        if key.startswith(prefix) and "." not in key[len(prefix) :]:
            yield key[len(prefix) :], value

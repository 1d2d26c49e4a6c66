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
    make_unfinished,
    unfinished_folder,
)
from dsgraph.errors import CheckpointError
from dsgraph.files import write_whole
from dsgraph.offload.saving import SavePlannerFromDisk, refuse_half

from .asynchronous import Writer
from .checkpoint_match import class_of
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
        CheckpointError: The tag or the client's state cannot be written, a rank's disk refused, or a failed load or
            step has left nothing to write; the checkpoint before stays the latest.
    """
    final, unfinished = folder / check_tag(tag), unfinished_folder(folder, tag)
    is_first, doing, about, tensors = dist.get_rank() == 0, f"save {final}", dict[str, Any](), dict[str, Any]()

    def look() -> None:
        refuse_half(engine.module, engine.optimizer)
        about.update(_about(engine, client_state))
        tensors.update(_tensors(engine))

    together(engine.module, doing, look)
    together(engine.module, doing, lambda: make_unfinished(folder, tag) if is_first else None)
    together(engine.module, doing, lambda: _write_rank(engine, unfinished))
    if writer is None:
        planner = SavePlannerFromDisk(engine.optimizer, frees_written=True)
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
    """Writes one file while it serializes the other.

    A thread of several asks for a tensor when it has written the one before, also beside CUDA: see `frees_written`.
    """
    return dcp.FileSystemWriter(folder, thread_count=2)


def _written(doing: str, folder: Path, write: Callable[[], Any]) -> None:
    """Lets torch write the tensors, which it plans with the other ranks: it raises on all of them."""
    try:
        write()
    except (dcp.api.CheckpointException, OSError) as error:
        free = shutil.disk_usage(folder).free
        raise CheckpointError(f"{doing}: {reason(error)}; {free:,} bytes are free there") from error


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

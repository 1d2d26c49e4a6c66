"""Checkpoints of an engine: written beside the last good one and renamed, so that no interruption loses it.

A checkpoint is a folder `<dir>/<tag>`. torch.distributed.checkpoint writes the tensors, each rank its own rows, and
reads them on any number of ranks, at any stage. `engine.json` has everything else as JSON, and a checksum of each file.
The file `<dir>/latest` names the newest; it is replaced last.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from dsgraph.errors import CheckpointError
from dsgraph.files import write_whole
from dsgraph.sharding.agreement import Agreement
from dsgraph.sharding.table import partitioned_parts

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_BLOCK = 2**22


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


def save(engine: Training, folder: Path, tag: str, client_state: dict[str, Any]) -> Path:
    """Writes a checkpoint. All ranks call it at the same point.

    Raises:
        CheckpointError: The tag or the client's state cannot be written, or a rank's disk refused; the checkpoint
            before stays the latest.
    """
    if not _TAG.fullmatch(tag):
        raise CheckpointError(f"tag {tag!r}: it takes letters, digits, '_', '-' and '.'")
    client, plain = _as_json(client_state), _plain_state(engine)
    unfinished, final = folder / f".{tag}.unfinished", folder / tag
    _together(engine, f"save {final}", lambda: _make_empty(unfinished) if dist.get_rank() == 0 else None)
    _together(engine, f"save {final}", lambda: _write_rank(engine, unfinished))
    # It plans and writes together with the other ranks, and raises on all of them.
    try:
        dcp.save(_tensors(engine), checkpoint_id=unfinished)
    except (dcp.api.CheckpointException, OSError) as error:
        free = shutil.disk_usage(folder).free
        raise CheckpointError(f"save {final}: {_reason(error)}; {free:,} bytes are free there") from error
    _together(
        engine,
        f"save {final}",
        lambda: _finish(engine, unfinished, final, client, plain) if dist.get_rank() == 0 else None,
    )
    return final


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
    if tag is None:
        latest = folder / "latest"
        if not latest.is_file():
            return None
        tag = latest.read_text().strip()
    path = folder / tag
    found: list[dict[str, Any]] = []
    _together(engine, f"load {path}", lambda: found.append(_checked(path)))
    (about,) = found
    groups, saved = len(engine.optimizer.param_groups), len(about["groups"])
    if groups != saved and not module_only:
        raise CheckpointError(f"load {path}: it has {saved} groups of parameters, and the optimizer {groups}")
    problem = "" if module_only else engine.why_not(about["engine"])
    if problem:
        raise CheckpointError(f"load {path}: {problem}: load_module_only=True takes the model alone")
    wanted = _wanted(engine, path, module_only=module_only)
    try:
        dcp.load(wanted, checkpoint_id=path)
    except (dcp.api.CheckpointException, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"load {path}: {_reason(error)}") from error
    _take_model(engine, wanted)
    if not module_only:
        _take_rest(engine, wanted, about, path)
    return path, about["client_state"]


def _together(engine: Training, doing: str, act: Callable[[], Any]) -> None:
    """Runs `act` on each rank; where one fails, all raise what it said."""
    mine = ""
    try:
        act()
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        mine = _reason(error)
    (part,) = partitioned_parts(engine.module)
    for rank, text in Agreement.over(part.mesh).exchange(f"how they {doing}", mine).items():
        if text:
            raise CheckpointError(f"{doing}: rank {rank}: {text}")


def _reason(error: BaseException) -> str:
    if isinstance(error, dcp.api.CheckpointException):
        return "; ".join(f"rank {rank}: {_reason(failure)}" for rank, (failure, _) in error.failures.items())
    deepest: BaseException | None = error
    while deepest is not None and not isinstance(deepest, OSError):
        deepest = deepest.__cause__ or deepest.__context__
    return " ".join(str(deepest or error).split())[:500] or type(error).__name__


def _as_json(client_state: dict[str, Any]) -> str:
    try:
        return json.dumps(client_state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"client_state: {error}; it takes what JSON can hold") from None


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


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


def _finish(engine: Training, unfinished: Path, final: Path, client: str, plain: dict[str, Any]) -> None:
    about = {
        "format": "dsgraph-engine-1",
        "ranks": dist.get_world_size(),
        "engine": engine.progress(),
        **plain,
        "client_state": json.loads(client),
        "config": engine.config.model_dump(mode="json"),
        "files": {path.name: _checksum(path) for path in sorted(unfinished.iterdir())},
    }
    write_whole(unfinished / "engine.json", json.dumps(about, indent=1).encode())
    if final.exists():  # the same tag once more: the new one is complete by now
        replaced = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        unfinished.rename(final)
        shutil.rmtree(replaced)
    else:
        unfinished.rename(final)
    write_whole(final.parent / "latest", f"{final.name}\n".encode())


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total


def _checked(path: Path) -> dict[str, Any]:
    """What `engine.json` says, when this rank's share of the files is as it was written."""
    try:
        about: dict[str, Any] = json.loads((path / "engine.json").read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(item.parent.name for item in path.parent.glob("*/engine.json")))
        raise CheckpointError(f"there is no checkpoint {path.name!r}; known: {known or 'none'}") from None
    except ValueError:
        raise CheckpointError("engine.json is damaged") from None
    for number, (name, checksum) in enumerate(about["files"].items()):
        if number % dist.get_world_size() != dist.get_rank():
            continue
        if not (path / name).is_file() or _checksum(path / name) != checksum:
            raise CheckpointError(f"file {name} is damaged or missing: load another checkpoint by its tag")
    return about


def _wanted(engine: Training, path: Path, *, module_only: bool) -> dict[str, Any]:
    """Tensors to read into: copies, so that nothing of the engine changes until all is there."""
    state: dict[str, Any] = {
        f"model.{name}": torch.empty_like(value)
        for name, value in engine.module.state_dict().items()
        if isinstance(value, Tensor)
    }
    if module_only:
        return state
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    owns = getattr(engine.optimizer, "owns", None)
    for name, param in engine.module.named_parameters():
        for key, about in known.items():
            if key.startswith(f"optimizer.{name}.") and "." not in key[len(f"optimizer.{name}.") :]:
                size, dtype = about.size, about.properties.dtype  # type: ignore[union-attr]
                is_whole = owns(param) if owns is not None else None
                if is_whole is False:  # another rank keeps it
                    continue
                like = is_whole is None and size == param.shape and len(size) > 0
                state[key] = torch.empty_like(param, dtype=dtype) if like else torch.empty(size, dtype=dtype)
    return state


def _take_model(engine: Training, state: dict[str, Any]) -> None:
    prefix = "model."
    engine.module.load_state_dict({key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)})


def _take_rest(engine: Training, state: dict[str, Any], about: dict[str, Any], path: Path) -> None:
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

"""Checkpoints of every layout: written next to the last good one and renamed, so that no interruption loses it.

A checkpoint is a folder `<dir>/<tag>`. torch.distributed.checkpoint writes the tensors, each rank its own rows, and
reads them on any number of ranks, at any stage. `engine.json` has everything else as JSON that keeps types, and a
checksum of each file, itself included. The file `<dir>/latest` names the newest; it is replaced last.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim import Optimizer

from dsgraph.compat.tensors import flatten_tree
from dsgraph.optim.hooks import hooks_of
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.joint_failure import all_or_none, on_first, reason
from dsgraph.utils.errors import CheckpointError
from dsgraph.utils.files import write_whole
from dsgraph.utils.typed_json import encode

from .asynchronous_save import Writer
from .checkpoint_files import encode_about
from .checkpoint_folder import Unfinished
from .checkpoint_match import class_of
from .disk_planners import SavePlannerFromDisk, refuse_half
from .model_tensors import ModelTensors


class Training(Protocol):
    """The content of a checkpoint: an engine, or a model with an optimizer."""

    @property
    def agreement(self) -> Agreement:
        """The ranks that save and load together."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of this rank's parameters; None: only the model is saved or loaded."""

    def tensors(self) -> ModelTensors:
        """Return the model's tensors on this rank."""

    def progress(self) -> dict[str, Any]:
        """Return the state of training that is not tensors."""

    def why_not(self, progress: Mapping[str, Any]) -> str:
        """Return why `go_on_from` cannot load a result of `progress`; empty if it can."""

    def take_schedule(self, progress: Mapping[str, Any]) -> None:
        """Load only the schedule; on an error the schedule is unchanged."""

    def go_on_from(self, progress: Mapping[str, Any]) -> None:
        """Load a result of `progress` of another run, except for the schedule."""


def save(
    training: Training,
    folder: Path,
    tag: str,
    *,
    client_state: Mapping[str, Any],
    config: Mapping[str, Any],
    writer: Writer | None = None,
) -> Path:
    """Write a checkpoint. All ranks call it at the same point.

    Args:
        training: The engine or model to save.
        folder: Folder of checkpoints.
        tag: Name of the checkpoint.
        client_state: Values that `load` returns.
        config: The configuration, as JSON values; it is not loaded.
        writer: Writes the checkpoint while training continues; None: it is complete on return.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: The tag or the client's state cannot be written, a rank's disk refused, or the model is
            incomplete after a failed load or step; the checkpoint before stays the latest.
    """
    doing, agreement = f"save {folder / tag}", training.agreement
    about, stored = _content(training, doing, client_state=dict(client_state), config=dict(config))
    begun: list[Unfinished] = []  # filled on the first rank only

    def begin() -> str:
        begun.append(Unfinished.begin(folder, tag))
        return begun[0].path.name

    attempt = _Attempt(doing, folder / str(on_first(agreement, doing, begin)), begun)
    with attempt.removing_failed():
        all_or_none(agreement, doing, lambda: _write_rank(attempt.path))
        if writer is None:
            planner = SavePlannerFromDisk(training.optimizer, frees_written=True)
            attempt.write(lambda: dcp.save(stored, storage_writer=_writing(attempt.path), planner=planner))
            all_or_none(agreement, doing, lambda: attempt.complete(about))
            return folder / tag
        written = dcp.async_save(stored, storage_writer=_writing(attempt.path, threads=1), process_group=writer.group())
        assert isinstance(written, Future), "only a custom stager returns something else"

    def end() -> None:
        with attempt.removing_failed():
            attempt.write(written.result)
            attempt.complete(about)  # dcp tells the first rank when the others have written

    writer.start(agreement, doing, end)
    return folder / tag


@dataclass
class _Attempt:
    """An attempt to write a checkpoint, on this rank.

    Attributes:
        doing: Description for error messages.
        path: Folder of its files until it is complete.
        begun: The checkpoint that the first rank completes; empty on other ranks.
    """

    doing: str
    path: Path
    begun: list[Unfinished]

    @contextmanager
    def removing_failed(self) -> Iterator[None]:
        """Remove what was written if the block fails. It fails on all ranks, so none is still writing."""
        try:
            yield
        except BaseException as error:
            for unfinished in self.begun:
                unfinished.give_up()
            if not self.begun:
                shutil.rmtree(self.path, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"{error}. What it had written was removed") from error
            raise

    def write(self, write: Callable[[], Any]) -> None:
        """Write the tensors with torch, which coordinates the ranks; an error is raised on all of them."""
        try:
            write()
        except (dcp.api.CheckpointException, OSError) as error:
            free = shutil.disk_usage(self.path.parent).free
            raise CheckpointError(f"{self.doing}: {reason(error)}; {free:,} bytes are free there") from error

    def complete(self, about: Mapping[str, Any]) -> None:
        """Turn the written files into a checkpoint, on the first rank."""
        for unfinished in self.begun:
            unfinished.complete(about)


def _writing(folder: Path, *, threads: int = 2) -> dcp.FileSystemWriter:
    """Return a writer that writes one file while it serializes the other.

    With several threads, each asks for a tensor when it has written the one before, also with CUDA: see
    `frees_written`. A save that may go on while Python ends takes one: from Python 3.12 on no other could start.
    """
    return dcp.FileSystemWriter(folder, thread_count=threads)


def _content(training: Training, doing: str, **given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of `engine.json` as JSON values, and this rank's tensors by name."""
    about, stored = dict[str, Any](), dict[str, Any]()

    agreement, found = training.agreement, list[ModelTensors]()

    def check() -> None:
        tensors = training.tensors()
        refuse_half(tensors.parameters.values(), training.optimizer)
        about.update(_about(training, tensors, **given))
        found.append(tensors)

    all_or_none(agreement, doing, check)  # before the next one, in which tensor-parallel ranks wait for each other
    all_or_none(agreement, doing, lambda: stored.update(_stored(found[0], training.optimizer)))
    # The first rank writes the file, and may lack parameters of other ranks.
    known: dict[str, Any] = json.loads(str(on_first(agreement, doing, lambda: json.dumps(about["optimizer"]))))
    missing = json.dumps({name: state for name, state in about["optimizer"].items() if name not in known})
    for text in agreement.exchange("which other values the optimizer has", missing).values():
        known = json.loads(text) | known
    return {**about, "optimizer": known}, stored


def _about(training: Training, tensors: ModelTensors, **given: Any) -> dict[str, Any]:
    """Return the content of `engine.json` as JSON values."""
    optimizer = training.optimizer
    about = encode_about(
        {
            "ranks": dist.get_world_size(),
            "layout": dict(tensors.layout),
            **_plain_state(tensors, optimizer),
            "optimizer_class": class_of(optimizer),
            "model": dict(tensors.description),
            **given,
        }
    )
    progress = {key: encode(value, f"{key} of the engine") for key, value in training.progress().items()}
    return {**about, "engine": progress}


def _write_rank(folder: Path) -> None:
    """Write the state that each rank has of its own: its random numbers."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    content = io.BytesIO()  # of a full disk, torch's own writer would say no more than "unexpected pos"
    torch.save(states, content)
    write_whole(folder / f"random-{dist.get_rank()}.pt", content.getvalue())


def _stored(tensors: ModelTensors, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return all tensors of model and optimizer, by names that say which parameter they belong to."""
    own = {name: value for name, value in tensors.values.items() if name not in tensors.unsaved}
    found = {f"model.{name}": tensors.full(name, value) for name, value in own.items()}
    for name, key, value in _optimizer_state(tensors, optimizer):
        if isinstance(value, Tensor):
            saved = tensors.saved_key(name, key, hooks_of(optimizer).own_keys)
            found[f"optimizer.{name}.{saved}"] = value if saved != key else tensors.full(name, value)
    return found


def _plain_state(tensors: ModelTensors, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the optimizer's state that is not tensors: for its parameters, and in its groups.

    Raises:
        CheckpointError: The model or the optimizer holds something that a checkpoint does not keep.
    """
    for name, value in tensors.values.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} of the model is a {type(value).__name__}, which a checkpoint does not hold")
    plain: dict[str, dict[str, Any]] = {}
    for name, key, value in _optimizer_state(tensors, optimizer):
        if isinstance(value, Tensor):
            hooks = hooks_of(optimizer)
            if hooks.owns(tensors.parameters[name]) is None and key not in hooks.own_keys:  # an owner stores all of it
                tensors.check_state(name, key, value)
        else:
            _refuse_tensors_within(value, f"optimizer state {key!r} of {name}")
            plain.setdefault(name, {})[key] = _plain(value, f"optimizer state {key!r} of {name}")
    groups = [
        {key: _plain(value, f"{key!r} of the optimizer") for key, value in group.items() if key != "params"}
        for group in ([] if optimizer is None else optimizer.param_groups)
    ]
    return {"groups": groups, "optimizer": plain}


def _optimizer_state(tensors: ModelTensors, optimizer: Optimizer | None) -> Iterator[tuple[str, str, Any]]:
    state = {} if optimizer is None else optimizer.state
    for name, param in tensors.parameters.items():
        for key, value in state.get(param, {}).items():
            if not isinstance(key, str) or "." in key or "@" in key:
                raise CheckpointError(
                    f"optimizer state of {name} has the key {key!r}: it takes text without '.' and '@'"
                )
            yield name, key, value


def _refuse_tensors_within(value: Any, what: str) -> None:
    """Refuse tensors inside containers: they differ between ranks, and only one rank's would be saved."""
    if any(isinstance(leaf, Tensor) for leaf in flatten_tree(value)[0]):
        raise CheckpointError(f"{what} is a {type(value).__name__} with tensors, which a checkpoint cannot store")


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:  # a learning rate that a recorded graph reads
        return value.item()
    encode(value, what)  # its error names the value as the user knows it, not by its position in the file
    return value

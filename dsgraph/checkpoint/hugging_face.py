"""Export of a partitioned model to Hugging Face's files, and import. No rank holds the whole model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future
from typing_extensions import override

from dsgraph.partitioning.rows import full_value
from dsgraph.ranks.joint_failure import all_or_none
from dsgraph.utils.errors import CheckpointError
from dsgraph.utils.weight_paths import weight_paths

from .disk_planners import refuse_half
from .load import is_on_disk, read_into
from .save import Training
from .weight_files import WeightFiles, begin, dtype_in_file, finish, unfinished


def export(training: Training, folder: Path, *, shard_bytes: int, dtype: torch.dtype | None) -> None:
    """Write the weights of a partitioned model. All ranks call it together.

    Parameters are gathered one by one. Ranks take turns to write files, and a rank keeps the weights of its next file:
    `shard_bytes` at most.

    Args:
        training: The training whose model is written.
        folder: The folder to write; it does not exist yet, or is empty. All ranks share the file system.
        shard_bytes: Largest size of a file in bytes.
        dtype: Dtype of floating-point weights; None: that of the shards.

    Raises:
        CheckpointError: The folder is not empty, a rank could not write, or the model is incomplete after a failed load
            or step; all ranks raise.
    """
    agreement, tensors, doing = training.agreement, training.tensors(), f"export {folder}"
    all_or_none(agreement, doing, lambda: refuse_half(tensors.parameters.values(), training.optimizer))
    state = {name: value for name, value in tensors.values.items() if name not in tensors.tied}
    files = WeightFiles.plan(
        {name: value.numel() * dtype_in_file(value.dtype, dtype).itemsize for name, value in state.items()},
        limit=shard_bytes,
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    all_or_none(agreement, doing, lambda: begin(folder) if rank == 0 else None)
    place = unfinished(folder)
    for first in range(0, len(files.names), ranks):
        mine: dict[str, Tensor] = {}
        for number in range(first, min(first + ranks, len(files.names))):
            for name in files.names[number]:
                full = full_value(state[name])
                if number % ranks == rank:
                    mine[name] = full.to("cpu", dtype_in_file(full.dtype, dtype))
        if mine:
            all_or_none(agreement, doing, lambda n=first + rank, t=mine: files.write(place, n, t))  # type: ignore[misc]
        else:
            all_or_none(agreement, doing, lambda: None)

    def end() -> None:
        files.write_rest(place, tensors.description, dtype=dtype)
        finish(folder)

    all_or_none(agreement, doing, end if rank == 0 else lambda: None)


def load_pretrained(training: Training, folder: Path) -> None:
    """Read Hugging Face's safetensors into a partitioned model: each rank its rows, file by file. All ranks call it.

    Args:
        training: The training whose model is read.
        folder: A folder of `*.safetensors` with the names of the model's `state_dict`. One of several tied weights is
            enough.

    Raises:
        CheckpointError: There are no such files, their index is damaged, or a weight is missing or has another shape.
            The model is unchanged, see `read_into`.
    """
    agreement, tensors, optimizer = training.agreement, training.tensors(), training.optimizer
    doing, reader, there = f"load {folder}", _ReaderByTensor(folder), dict[str, Any]()
    in_place = is_on_disk(tensors, optimizer, module_only=True)
    all_or_none(agreement, doing, tensors.refuse_slices_on_disk)
    all_or_none(agreement, doing, lambda: there.update(_weights_in(folder, reader)))
    tied, state = tensors.tied, tensors.values
    wanted = {n: value if in_place else tensors.empty(n, value) for n, value in state.items() if n not in tied}
    names = {name: _name_in(there, name, tied) for name in wanted}
    all_or_none(agreement, doing, lambda: _check(wanted, there, names))
    # The reader converts dtypes itself.
    found = {names[name]: value for name, value in wanted.items()}
    read_into(found, reader, tensors, doing=doing, optimizer=optimizer, module_only=True, in_place=in_place)
    if not in_place:
        wanted |= {name: tensors.own(name, wanted[name]) for name in tensors.slices if name in wanted}
        tensors.put({name: wanted[tied.get(name, name)] for name in state})


class _FilesByIndex(FileSystem):
    """A file system that shows a reader only the files of a folder that belong to the model."""

    @override
    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(file) for file in weight_paths(Path(path))]


class _ReaderByTensor(HuggingFaceStorageReader):
    """A reader that opens a file again for each tensor: mapped memory would stay allocated until the file is closed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.fs = _FilesByIndex()

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            super().read_data(replace(plan, items=[item]), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _weights_in(folder: Path, reader: HuggingFaceStorageReader) -> dict[str, Any]:
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError("there are no *.safetensors in it")
    return dict(reader.read_metadata().state_dict_metadata)


def _name_in(there: dict[str, Any], name: str, tied: Mapping[str, str]) -> str:
    """Return the name of a parameter in a file: its own, or that of one tied to it."""
    others = [other for other, first in tied.items() if first == name]
    return next((candidate for candidate in (name, *others) if candidate in there), name)


def _check(wanted: dict[str, Tensor], there: dict[str, Any], names: dict[str, str]) -> None:
    missing = [name for name in wanted if names[name] not in there]
    if missing:
        raise CheckpointError(
            f"there is no {missing[0]!r} in it, nor {len(missing) - 1} other weights of the model; it has "
            f"{', '.join(list(there)[:3])}, ..."
        )
    for name, value in wanted.items():
        size = there[names[name]].size
        if size != value.shape:
            raise CheckpointError(f"{name!r} is {list(size)} in it and {list(value.shape)} in the model")

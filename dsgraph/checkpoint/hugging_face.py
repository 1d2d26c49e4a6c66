"""A partitioned model out to and in from Hugging Face's files. No rank holds the whole model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import override

from dsgraph.utils.errors import CheckpointError
from dsgraph.utils.weight_paths import weight_paths

from .disk_planners import refuse_half
from .load import HasTensors, is_on_disk, read_into
from .on_all_ranks import together
from .weight_files import WeightFiles, begin, describe, dtype_in_file, finish, unfinished


def export(engine: HasTensors, folder: Path, *, shard_bytes: int, dtype: torch.dtype | None) -> None:
    """Writes the weights of a partitioned model. All ranks call it together.

    Parameters are gathered one by one. Files take turns among ranks, and a rank keeps what goes into the file that it
    is to write next: `shard_bytes` at most.

    Args:
        engine: Its model is what is written.
        folder: Where to; not there yet, or empty. All ranks see the same file system.
        shard_bytes: Bytes of a file, at most.
        dtype: Dtype of floating-point weights; None: that of the shards.

    Raises:
        CheckpointError: The folder is not empty, a rank could not write, or a failed load or step has left nothing to
            write; all ranks raise.
    """
    module, doing = engine.module, f"export {folder}"
    together(module, doing, lambda: refuse_half(module, engine.optimizer))
    about = describe(module)
    state = {name: value for name, value in module.state_dict(keep_vars=True).items() if name not in about["tied"]}
    files = WeightFiles.plan(
        {name: value.numel() * dtype_in_file(value.dtype, dtype).itemsize for name, value in state.items()},
        limit=shard_bytes,
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    together(module, doing, lambda: begin(folder) if rank == 0 else None)
    place = unfinished(folder)
    for first in range(0, len(files.names), ranks):
        mine: dict[str, Tensor] = {}
        for number in range(first, min(first + ranks, len(files.names))):
            for name in files.names[number]:
                full = _whole(state[name])
                if number % ranks == rank:
                    mine[name] = full.to("cpu", dtype_in_file(full.dtype, dtype))
        if mine:
            together(module, doing, lambda n=first + rank, t=mine: files.write(place, n, t))  # type: ignore[misc]
        else:
            together(module, doing, lambda: None)

    def end() -> None:
        files.write_rest(place, about, dtype=dtype)
        finish(folder)

    together(module, doing, end if rank == 0 else lambda: None)


def load_pretrained(engine: HasTensors, folder: Path) -> None:
    """Reads Hugging Face's safetensors into a partitioned model: each rank its rows, file by file. All ranks call it.

    Args:
        engine: Its model is what is read.
        folder: Has `*.safetensors`, whose names are those of the model's `state_dict`. Of tied weights one is enough.

    Raises:
        CheckpointError: There are no such files, their index is damaged, or a weight is missing or has another shape.
            The model is as it was, see `read_into`.
    """
    module, doing = engine.module, f"load {folder}"
    reader, in_place = _ReaderByTensor(folder), is_on_disk(engine, module_only=True)
    there: dict[str, Any] = {}
    together(module, doing, lambda: there.update(_weights_in(folder, reader)))
    tied, state = describe(module)["tied"], module.state_dict()
    wanted = {n: value if in_place else torch.empty_like(value) for n, value in state.items() if n not in tied}
    names = {name: _name_in(there, name, tied) for name in wanted}
    together(module, doing, lambda: _check(wanted, there, names))
    # The reader converts dtypes itself.
    found = {names[name]: value for name, value in wanted.items()}
    read_into(found, reader, engine, doing=doing, module_only=True)
    if not in_place:
        module.load_state_dict({name: wanted[tied.get(name, name)] for name in state})


class _FilesByIndex(FileSystem):
    """Shows a reader the files of a folder that count."""

    @override
    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(file) for file in weight_paths(Path(path))]


class _ReaderByTensor(HuggingFaceStorageReader):
    """Opens a file anew for each tensor: what is mapped of it would stay in memory until it is closed."""

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


def _name_in(there: dict[str, Any], name: str, tied: dict[str, str]) -> str:
    """Under which name a file has a parameter: its own, or that of one tied to it."""
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


def _whole(value: Tensor) -> Tensor:
    with torch.no_grad():
        return value.full_tensor() if isinstance(value, DTensor) else value.detach()

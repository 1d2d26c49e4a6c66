"""Sources of weights, full or a rank's slice: files of transformers, or a training engine's checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsgraph.checkpoint.checkpoint_files import ABOUT, read_about
from dsgraph.checkpoint.checkpoint_folder import find_tag
from dsgraph.inductor_ext import slice_of
from dsgraph.passes.parallel.slices import Slice
from dsgraph.utils.errors import CheckpointError, InferenceError
from dsgraph.utils.weight_paths import weight_paths

_EXPERT = re.compile(r"(.+)\.block_sparse_moe\.experts\.(\d+)\.w([123])\.weight")
_GATE = ".block_sparse_moe.gate.weight"


@dataclass(frozen=True)
class WeightSource:
    """A source of weights.

    Attributes:
        shapes: Name -> full shape.
        read: Returns a weight, or this rank's slice of it, from name, slice, rank and number of ranks.
        files: Name -> its file; empty if there is only one.
    """

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str, Slice | None, int, int], Tensor]
    files: dict[str, str]


def engine_folder(folder: Path) -> Path | None:
    """Return the training engine's checkpoint that a folder is, or the latest that it contains; None for neither."""
    tag = find_tag(folder)
    path = folder if tag is None else folder / tag
    return path if (path / ABOUT).is_file() else None


def open_source(folder: Path, stack: ExitStack) -> WeightSource:
    """Open the weights in a folder.

    Args:
        folder: A folder of `*.safetensors`, or of a training engine's checkpoints.
        stack: Closes what is read.

    Raises:
        InferenceError: It is damaged, or a file or a part of an expert is missing.
    """
    path = None
    try:
        path = engine_folder(folder)
        return _with_experts(_of_files(folder, stack)) if path is None else _of_engine(path)
    except (CheckpointError, SafetensorError, OSError) as error:
        raise InferenceError(f"init_inference: checkpoint={str(path or folder)!r}: {error}") from error


def find(source: WeightSource, names: list[str], *, shape: tuple[int, ...], prefix: str, folder: Path) -> str:
    """Return the name of a weight in a source.

    Args:
        source: The source.
        names: Its names in the model; messages use the first one.
        shape: Its shape in the model.
        prefix: Of the names of a model with a head, such as "transformer."; files may be of the model without, or of
            one with another head.
        folder: For messages.

    Raises:
        InferenceError: It is missing, or has another shape.
    """
    others = [name.removeprefix(prefix) if name.startswith(prefix) else prefix + name for name in names]
    there = next((each for each in (*names, *others) if each in source.shapes), None)
    if there is None:
        raise InferenceError(
            f"init_inference: checkpoint={str(folder)!r} has no {names[0]!r}; it has "
            f"{', '.join(list(source.shapes)[:3])}, ...: load it by from_pretrained, and leave checkpoint out"
        )
    if source.shapes[there] != shape:
        raise InferenceError(
            f"init_inference: {there!r} of checkpoint={str(folder)!r} is {list(source.shapes[there])}, and "
            f"{list(shape)} in the model"
        )
    return there


class _Shards:
    """Files of weights, of which one is open at a time."""

    def __init__(self, stack: ExitStack) -> None:
        self._open: tuple[Path, Any] | None = None
        self._within: ExitStack = stack.enter_context(ExitStack())

    def file(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path:
            self._within.close()
            self._open = path, self._within.enter_context(safe_open(path, framework="pt"))
        return self._open[1]


def _of_files(folder: Path, stack: ExitStack) -> WeightSource:
    shards = _Shards(stack)
    shapes: dict[str, tuple[int, ...]] = {}
    where: dict[str, Path] = {}
    for path in weight_paths(folder):
        try:
            file = shards.file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path.name} is damaged: {error}") from error
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            shapes[name], where[name] = tuple(file.get_slice(name).get_shape()), path

    def read(name: str, held: Slice | None, rank: int, count: int) -> Tensor:
        file = shards.file(where[name])
        if held is None:
            whole: Tensor = file.get_tensor(name)
            return whole.clone()  # the file's memory is not aligned
        stored, size = file.get_slice(name), shapes[name][held.dim] // (held.parts * count)
        starts = [(part * count + rank) * size for part in range(held.parts)]
        ahead: tuple[slice, ...] = (slice(None),) * held.dim
        return torch.cat([stored[ahead + (slice(start, start + size),)] for start in starts], held.dim)

    return WeightSource(shapes, read, {name: path.name for name, path in where.items()})


def _with_experts(base: WeightSource) -> WeightSource:
    """Return a source that also has the names of Mixtral's layers, if the files contain single experts.

    gate_up_proj[e] = w1 of expert e above its w3        down_proj[e] = w2 of expert e
    """
    made: dict[str, list[list[str]]] = {}
    renamed: dict[str, str] = {}
    for name in base.shapes:
        found = _EXPERT.fullmatch(name)
        if found is not None and found[3] != "3":
            layer, pieces = f"{found[1]}.mlp.experts", [name]
            if found[3] == "1":
                pieces = [name, name.replace(".w1.", ".w3.")]
            whole = f"{layer}.gate_up_proj" if found[3] == "1" else f"{layer}.down_proj"
            made.setdefault(whole, []).append(pieces)
        if name.endswith(_GATE):
            renamed[name.replace(".block_sparse_moe.", ".mlp.")] = name
    for experts in made.values():
        experts.sort(key=_expert_number)
        _check_pieces(base, experts)
    shapes = {name: _stacked_shape(base, experts) for name, experts in made.items()}

    def read(name: str, held: Slice | None, rank: int, count: int) -> Tensor:
        if name not in made:
            return base.read(renamed.get(name, name), held, rank, count)
        pieces = len(made[name][0])
        of_piece = None if held is None else _of_piece(held, pieces)
        if held is not None and of_piece is None:
            return slice_of(read(name, None, 0, 1), held.dim, parts=held.parts, ranks=count, rank=rank)
        return torch.stack(
            [torch.cat([base.read(one, of_piece, rank, count) for one in expert]) for expert in made[name]]
        )

    files = base.files | {new: base.files[old] for new, old in renamed.items()}
    files |= {name: base.files[experts[0][0]] for name, experts in made.items()}
    return WeightSource(base.shapes | {new: base.shapes[old] for new, old in renamed.items()} | shapes, read, files)


def _expert_number(pieces: list[str]) -> int:
    found = _EXPERT.fullmatch(pieces[0])
    assert found is not None
    return int(found[2])


def _check_pieces(base: WeightSource, experts: list[list[str]]) -> None:
    """Check that the pieces of a layer's experts are all there, with one shape."""
    first = experts[0][0]
    for name in (piece for pieces in experts for piece in pieces):
        if name not in base.shapes:
            raise CheckpointError(f"there is no {name!r}, and there is {first!r}: fetch all files of the model")
        if base.shapes[name] != base.shapes[first]:
            raise CheckpointError(
                f"{name!r} is {list(base.shapes[name])}, and {first!r} is {list(base.shapes[first])}: they must agree"
            )


def _stacked_shape(base: WeightSource, experts: list[list[str]]) -> tuple[int, ...]:
    rows, *rest = base.shapes[experts[0][0]]
    return (len(experts), rows * len(experts[0]), *rest)


def _of_piece(held: Slice, pieces: int) -> Slice | None:
    """Return the slice of each piece of an expert's weight; None if slices do not follow pieces."""
    if held.dim > 1:
        return Slice(held.dim - 1, held.parts)
    return Slice(0) if held == Slice(1, pieces) else None


def _of_engine(path: Path) -> WeightSource:
    about = read_about(path)
    prefix = "model."
    tied = (about.get("model") or {}).get("tied", {})
    saved: dict[str, Any] = {
        key[len(prefix) :]: value
        for key, value in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if key.startswith(prefix) and key[len(prefix) :] not in tied
    }

    def read(name: str, held: Slice | None, rank: int, count: int) -> Tensor:
        key = prefix + name
        state = {key: torch.empty(saved[name].size, dtype=saved[name].properties.dtype)}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        if held is None:
            return state[key]
        return slice_of(state[key], held.dim, parts=held.parts, ranks=count, rank=rank)

    return WeightSource({name: tuple(value.size) for name, value in saved.items()}, read, {})

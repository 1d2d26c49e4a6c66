"""Weights of which each rank reads its slices, one at a time: of transformers' files, or a training checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsgraph.checkpoint_files import latest_tag, read_about
from dsgraph.errors import CheckpointError, InferenceError
from dsgraph.passes.parallel.slices import Slice

from .ranks import SlicingRanks


@dataclass(frozen=True)
class Source:
    """Where weights come from.

    Attributes:
        shapes: Name -> full shape.
        read: Gives a weight, or this rank's slice of it, from name, slice, rank and number of ranks.
    """

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str, Slice | None, int, int], Tensor]


def engine_folder(folder: Path) -> Path | None:
    """The checkpoint of a training engine that a folder is, or the latest that it holds; None: neither."""
    tag = latest_tag(folder)
    path = folder if tag is None else folder / tag
    return path if (path / "engine.json").is_file() else None


def load_weights(
    model: nn.Module, folder: Path, *, dtype: torch.dtype | None, device: torch.device, ranks: SlicingRanks | None
) -> None:
    """Reads the weights of a model into it, one at a time; one on the meta device gets memory for what it holds.

    Args:
        model: Sliced already, if it is to be.
        folder: Of `*.safetensors`, or of a training engine's checkpoints.
        dtype: Of floating-point weights; None: as they were saved.
        device: Where they go.
        ranks: Those that share the model.

    Raises:
        InferenceError: A weight is missing or has another shape; no weight was changed.
    """
    with ExitStack() as stack:
        path = engine_folder(folder)
        source = _of_files(folder, stack) if path is None else _of_engine(path)
        names = _names(model)
        wanted = dict(model.named_parameters()) | _buffers(model)
        found = {name: _found(source, name, names[name], tuple(value.shape), folder) for name, value in wanted.items()}
        plan = getattr(model, "tensor_plan", None)
        rank = 0 if ranks is None else ranks.mesh.get_local_rank()
        for name, value in wanted.items():
            held = plan.slices.get(name) if plan is not None else None
            own = source.read(found[name], held, rank, 1 if ranks is None else ranks.count)
            own = own.to(device, dtype if dtype is not None and own.is_floating_point() else own.dtype)
            _put(model, names[name], value, own)
    _fill_other_buffers(model, device)


def _names(model: nn.Module) -> dict[str, list[str]]:
    """First name of each weight -> all names that share it."""
    firsts: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, value in pairs:
        found.setdefault(firsts.setdefault(id(value), name), []).append(name)
    return found


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _found(source: Source, name: str, names: list[str], shape: tuple[int, ...], folder: Path) -> str:
    there = next((each for each in names if each in source.shapes), None)
    if there is None:
        raise InferenceError(
            f"init_inference: checkpoint={str(folder)!r} has no {name!r}; it has "
            f"{', '.join(list(source.shapes)[:3])}, ...: load it by from_pretrained, and leave checkpoint out"
        )
    if source.shapes[there] != shape:
        raise InferenceError(
            f"init_inference: {there!r} of checkpoint={str(folder)!r} is {list(source.shapes[there])}, and "
            f"{list(shape)} in the model"
        )
    return there


def _of_files(folder: Path, stack: ExitStack) -> Source:
    where: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        opened: Any = stack.enter_context(safe_open(file, framework="pt"))
        where.update(dict.fromkeys(opened.keys(), opened))
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in where.items()}

    def read(name: str, held: Slice | None, rank: int, count: int) -> Tensor:
        if held is None:
            return where[name].get_tensor(name)
        stored, size = where[name].get_slice(name), shapes[name][held.dim] // (held.parts * count)
        starts = [(part * count + rank) * size for part in range(held.parts)]
        ahead: tuple[slice, ...] = (slice(None),) * held.dim
        return torch.cat([stored[ahead + (slice(start, start + size),)] for start in starts], held.dim)

    return Source(shapes, read)


def _of_engine(path: Path) -> Source:
    try:
        about = read_about(path)
    except CheckpointError as error:
        raise InferenceError(f"init_inference: checkpoint={str(path)!r}: {error}") from error
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
        pieces = state[key].unflatten(held.dim, (held.parts, count, -1))
        return pieces.select(held.dim + 1, rank).flatten(held.dim, held.dim + 1).contiguous()

    return Source({name: tuple(value.size) for name, value in saved.items()}, read)


def _put(model: nn.Module, names: list[str], value: Tensor, own: Tensor) -> None:
    """Puts a weight in the place of another, wherever that is held."""
    made: Any = own
    if isinstance(value, DTensor):
        made = DTensor.from_local(
            own, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    is_parameter = isinstance(value, nn.Parameter)
    made = nn.Parameter(made, requires_grad=False) if is_parameter else made
    for name in names:
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        (module._parameters if is_parameter else module._buffers)[leaf] = made


def _fill_other_buffers(model: Any, device: torch.device) -> None:
    """Gives the buffers that no checkpoint holds, such as rotary frequencies, what the model gives them."""
    for name, module in model.named_modules():
        lost = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not lost:
            continue
        if any(param is not None for param in module._parameters.values()) or not hasattr(model, "_init_weights"):
            raise InferenceError(
                f"init_inference: buffer {lost[0]!r} of {name!r} is on the meta device, and nothing fills it: build "
                "the model on a device"
            )
        for key in lost:
            module._buffers[key] = torch.empty_like(module._buffers[key], device=device)
        with torch.no_grad():
            model._init_weights(module)

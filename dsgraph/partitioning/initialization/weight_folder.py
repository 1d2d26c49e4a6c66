"""A folder of `*.safetensors`, from which modules get their values one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dsgraph.partitioning.state import PartitionState
from dsgraph.ranks.agreement import Agreement
from dsgraph.utils.errors import PartitionError
from dsgraph.utils.weight_paths import weight_paths


class WeightFolder:
    """Tensors by name, as `save_pretrained` of transformers and `Engine.export` write them.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        """Find the file of each tensor.

        Raises:
            PartitionError: There are no such files.
            CheckpointError: Their index is damaged, or names a missing file.
        """
        self.path = path
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in weight_paths(path):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no dict
                    self._files[name] = file
                    self._shapes[name] = tuple(opened.get_slice(name).get_shape())
        if not self._files:
            raise PartitionError(f"weights: there are no *.safetensors in {path}")

    def name_of(self, names: Iterable[str], shape: Iterable[int]) -> str:
        """Return the name, of several, under which a tensor is stored here.

        Raises:
            PartitionError: None of them is stored, or it has another shape.
        """
        names, shape = list(names), tuple(shape)
        found = next((name for name in names if name in self._files), None)
        if found is None:
            some = ", ".join(list(self._files)[:3])
            raise PartitionError(
                f"weights: there is no {names[0]!r} in {self.path}, which the model has; it has {some}"
            )
        if self._shapes[found] != shape:
            raise PartitionError(
                f"weights: {found!r} is {list(self._shapes[found])} in {self.path} and {list(shape)} in the model"
            )
        return found

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Copy a full tensor, converted to the other's dtype."""
        # Opened again for each tensor: mapped pages of a file stay in memory until it is closed.
        with safe_open(self._files[name], framework="pt") as opened:
            tensor.copy_(opened.get_tensor(name))


def weight_initialisers(
    model: nn.Module, path: Path, part: PartitionState, other: Callable[[nn.Module], Callable[[nn.Module], object]]
) -> dict[nn.Module, Callable[[nn.Module], object]]:
    """Return the functions that load each module of a model on the meta device from a folder.

    Args:
        model: The partitioned model.
        path: The folder.
        part: The table of the model.
        other: Returns the initialiser of a module. It runs first if buffers of the module are in no checkpoint.

    Raises:
        PartitionError: A tensor is missing or has another shape, on some rank; all raise, and nothing was changed.
    """
    found: dict[nn.Module, Callable[[nn.Module], object]] = {}
    problem = ""
    try:
        found = _initialisers(model, WeightFolder(path), other)
    except PartitionError as error:
        problem = str(error)
    except Exception as error:  # a damaged file; the other ranks wait for the message
        problem = f"weights: {path}: {error}"
    for rank, said in Agreement.over(part.parameter_mesh).exchange("what they find of weights", problem).items():
        if said:
            raise PartitionError(f"rank {rank}: {said}")
    return found


def _initialisers(
    model: nn.Module, folder: WeightFolder, other: Callable[[nn.Module], Callable[[nn.Module], object]]
) -> dict[nn.Module, Callable[[nn.Module], object]]:
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
    done: set[int] = set()
    found: dict[nn.Module, Callable[[nn.Module], object]] = {}
    for module in model.modules():
        held = {**module._parameters, **module._buffers}
        on_meta = {key: value for key, value in held.items() if value is not None and value.is_meta}
        wanted = {
            key: folder.name_of(names[id(value)], value.shape)
            for key, value in on_meta.items()
            if id(value) in names and id(value) not in done  # tied parameters are read once
        }
        done |= {id(value) for value in on_meta.values()}
        is_lost = any(id(value) not in names for value in on_meta.values())
        if on_meta:
            found[module] = _filler(folder, wanted, other(module) if is_lost else None)
    return found


def _filler(
    folder: WeightFolder, wanted: dict[str, str], first: Callable[[nn.Module], object] | None
) -> Callable[[nn.Module], object]:
    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        if first is not None:
            first(module)
        held: dict[str, Any] = {**module._parameters, **module._buffers}
        for key, name in wanted.items():
            folder.read_into(name, held[key])

    return fill

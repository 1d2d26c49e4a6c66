"""Weights in the files of Hugging Face: `*.safetensors` of a bounded size, their index, and `config.json`.

Every folder that is written here appears complete: it is written under another name and renamed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dsgraph.utils.errors import CheckpointError
from dsgraph.utils.weight_paths import INDEX

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of exported weights, by the names of the command line."""


@dataclass(frozen=True)
class WeightFiles:
    """The assignment of tensors to files.

    Attributes:
        names: The tensors of each file, in order.
        bytes: Bytes of all tensors.
    """

    names: tuple[tuple[str, ...], ...]
    bytes: int

    @classmethod
    def plan(cls, sizes: Mapping[str, int], *, limit: int) -> WeightFiles:
        """Fill files one after the other, in the given order.

        Args:
            sizes: Bytes of each tensor.
            limit: Largest size of a file in bytes; a larger tensor has a file of its own.
        """
        files: list[list[str]] = [[]]
        filled = 0
        for name, size in sizes.items():
            if files[-1] and filled + size > limit:
                files.append([])
                filled = 0
            files[-1].append(name)
            filled += size
        return cls(tuple(map(tuple, files)), sum(sizes.values()))

    def file(self, number: int) -> str:
        """Return the name of a file, as transformers expects it."""
        count = len(self.names)
        return "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"

    def write(self, folder: Path, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one file.

        Args:
            folder: The folder.
            number: The number of the file.
            tensors: The full tensors of the file, in host memory.
        """
        mine = {name: tensors[name].contiguous() for name in self.names[number]}
        save_file(mine, folder / self.file(number), metadata={"format": "pt"})

    def write_rest(self, folder: Path, about: Mapping[str, Any], *, dtype: torch.dtype | None) -> None:
        """Write the index of several files, and the model's configuration.

        Args:
            folder: The folder.
            about: The result of `describe` for the model.
            dtype: The dtype that the weights were cast to; None: they were not.
        """
        if len(self.names) > 1:
            places = {name: self.file(number) for number, names in enumerate(self.names) for name in names}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": places}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for file, settings in about["configs"].items():
            cast = {"dtype": str(dtype).removeprefix("torch.")} if dtype is not None and file == "config.json" else {}
            (folder / file).write_text(json.dumps({**settings, **cast}, indent=2) + "\n")


def describe(module: nn.Module) -> dict[str, Any]:
    """Return the description of a model besides its weights, as JSON values.

    Returns:
        `configs`: the contents of a transformers model's other files; empty for another model.
        `tied`: for each name that shares its parameter with an earlier one, the earlier name.
    """
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and first.setdefault(id(value), name) != name:
            tied[name] = first[id(value)]
    configs = {}
    for file, attribute in (("config.json", "config"), ("generation_config.json", "generation_config")):
        as_json = getattr(getattr(module, attribute, None), "to_json_string", None)
        if callable(as_json):
            configs[file] = json.loads(as_json())
    if "config.json" in configs:
        configs["config.json"]["architectures"] = [type(module).__name__]
    return {"configs": configs, "tied": tied}


def begin(folder: Path) -> Path:
    """Create the folder in which a new one is written.

    Raises:
        CheckpointError: `folder` is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty: choose another folder")
    place = unfinished(folder)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def finish(folder: Path) -> None:
    """Rename the written folder to its final name."""
    if folder.exists():
        folder.rmdir()
    unfinished(folder).rename(folder)


def unfinished(folder: Path) -> Path:
    """Return the path where a folder is written until it is complete."""
    folder = folder.absolute()
    return folder.with_name(f".{folder.name}.unfinished")


def dtype_in_file(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a weight is written: unchanged, or `wanted` if it is floating-point."""
    return dtype if wanted is None or not dtype.is_floating_point else wanted

"""Weights in the files of Hugging Face: `*.safetensors` of a bounded size, their index, and `config.json`.

Every folder that is written here comes into being whole: it is written under another name and renamed.
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
    """Which tensor goes into which file.

    Attributes:
        names: The tensors of each file, in order.
        bytes: Of all tensors.
    """

    names: tuple[tuple[str, ...], ...]
    bytes: int

    @classmethod
    def plan(cls, sizes: Mapping[str, int], *, limit: int) -> WeightFiles:
        """Fills files one after the other, in the order given.

        Args:
            sizes: Bytes of each tensor.
            limit: Bytes of a file, at most; a tensor that is larger has a file of its own.
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
        """The name of a file, as transformers looks for it."""
        count = len(self.names)
        return "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"

    def write(self, folder: Path, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes one file.

        Args:
            folder: Where to.
            number: Which file.
            tensors: Those of the file, whole, in the host's memory.
        """
        mine = {name: tensors[name].contiguous() for name in self.names[number]}
        save_file(mine, folder / self.file(number), metadata={"format": "pt"})

    def write_rest(self, folder: Path, about: Mapping[str, Any], *, dtype: torch.dtype | None) -> None:
        """Writes the index of several files, and the model's configuration.

        Args:
            folder: Where to.
            about: What `describe` said of the model.
            dtype: What the weights were cast to; None: they were not.
        """
        if len(self.names) > 1:
            places = {name: self.file(number) for number, names in enumerate(self.names) for name in names}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": places}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for file, settings in about["configs"].items():
            cast = {"dtype": str(dtype).removeprefix("torch.")} if dtype is not None and file == "config.json" else {}
            (folder / file).write_text(json.dumps({**settings, **cast}, indent=2) + "\n")


def describe(module: nn.Module) -> dict[str, Any]:
    """What weights alone do not say of a model, as JSON values.

    Returns:
        `configs`: what the files of a transformers model besides its weights hold; empty for another model.
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
    """Makes the folder in which a new one is written.

    Raises:
        CheckpointError: There is something in `folder` already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty: choose another folder")
    place = unfinished(folder)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def finish(folder: Path) -> None:
    """Gives what was written its name."""
    if folder.exists():
        folder.rmdir()
    unfinished(folder).rename(folder)


def unfinished(folder: Path) -> Path:
    """Where a folder is written until it is complete."""
    folder = folder.absolute()
    return folder.with_name(f".{folder.name}.unfinished")


def dtype_in_file(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """In which dtype a weight is written: as it is, or, if it is a floating-point one, as `wanted`."""
    return dtype if wanted is None or not dtype.is_floating_point else wanted

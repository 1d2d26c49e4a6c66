"""The files of a folder that hold the weights of a model: those that an index names, or all."""

from __future__ import annotations

import json
from pathlib import Path

from dsgraph.utils.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def weight_paths(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder that belong to the model.

    A folder with an index may also contain older weights, or the same ones under other names: then only the files of
    the index are used.

    Args:
        folder: A folder as `save_pretrained` of transformers writes it.

    Returns:
        The files that the index names, or all `*.safetensors` where there is none, by name.

    Raises:
        CheckpointError: The index is damaged, or names a missing file.
    """
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = [folder / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # no JSON, or of other things
        raise CheckpointError(f"{index} is damaged ({type(error).__name__}): fetch or write it anew") from error
    lost = [path.name for path in paths if not path.is_file()]
    if lost:
        raise CheckpointError(
            f"{folder} lacks {lost[0]!r}, which {INDEX} names: fetch that file, or delete the index if it is of older "
            "weights"
        )
    return paths

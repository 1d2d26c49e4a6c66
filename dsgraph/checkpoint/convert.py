"""Conversion of checkpoints, in one process and without the model.

An engine's checkpoint becomes Hugging Face's files; Hugging Face's files, or a ZeRO checkpoint of DeepSpeed, become an
engine's checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsgraph.utils.errors import CheckpointError
from dsgraph.utils.typed_json import encode
from dsgraph.utils.weight_paths import weight_paths

from .checkpoint_files import ABOUT, check_tag, encode_about, read_about
from .checkpoint_folder import Unfinished, find_tag
from .deepspeed_files import DeepSpeedCheckpoint, is_deepspeed, read_deepspeed
from .step_counts import StepCounts, progress_at
from .weight_files import WeightFiles, begin, dtype_in_file, finish


def export_checkpoint(folder: Path, out: Path, *, tag: str | None, shard_bytes: int, dtype: torch.dtype | None) -> Path:
    """Write the weights of an engine's checkpoint as safetensors, with one file in memory at a time.

    Args:
        folder: The folder of one checkpoint, or of several.
        out: The folder to write; it does not exist yet, or is empty.
        tag: The tag of one of several; None: the latest.
        shard_bytes: Largest size of a file in bytes.
        dtype: Dtype of floating-point weights; None: as they were saved.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged; nothing is written.
    """
    path, about = _checked(folder, tag)
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    model = about.get("model") or {"configs": {}, "tied": {}}
    prefix = "model."
    tensors = {
        key[len(prefix) :]: saved
        for key, saved in known.items()
        if key.startswith(prefix) and key[len(prefix) :] not in model["tied"]
    }
    dtypes = {name: dtype_in_file(saved.properties.dtype, dtype) for name, saved in tensors.items()}  # type: ignore[union-attr]
    sizes = {name: saved.size.numel() * dtypes[name].itemsize for name, saved in tensors.items()}  # type: ignore[union-attr]
    files = WeightFiles.plan(sizes, limit=shard_bytes)
    unfinished = begin(out)
    for number, names in enumerate(files.names):
        read: dict[str, Any] = {
            prefix + name: torch.empty(tensors[name].size, dtype=tensors[name].properties.dtype)  # type: ignore[union-attr]
            for name in names
        }
        dcp.load(read, checkpoint_id=path, no_dist=True)
        files.write(unfinished, number, {name: read[prefix + name].to(dtypes[name]) for name in names})
    files.write_rest(unfinished, model, dtype=dtype)
    finish(out)
    return path


def import_checkpoint(source: Path, out: Path, *, tag: str | None) -> tuple[Path, dict[str, Any]]:
    """Convert Hugging Face's safetensors, or a ZeRO checkpoint of DeepSpeed, to an engine's checkpoint.

    From safetensors it has only the weights: `engine.load_checkpoint(out, load_module_only=True)` loads them. From
    DeepSpeed's checkpoint it has masters, optimizer, schedule, loss scale and counts.

    Args:
        source: The folder.
        out: Folder of checkpoints.
        tag: Name of the new one; None: `global_step<N>`.

    Returns:
        Its folder, and a human-readable description of its content.

    Raises:
        CheckpointError: The source is neither, or cannot be read; `out` is unchanged.
    """
    if is_deepspeed(source):
        found = read_deepspeed(source)
        state, about, said = _of_deepspeed(found)
    elif any(source.glob("*.safetensors")):
        state, about, said = _of_safetensors(source)
    else:
        raise CheckpointError(f"{source} holds neither *.safetensors nor a ZeRO checkpoint of DeepSpeed's")
    tag = check_tag(tag or f"global_step{about['engine']['counts']['steps']}")
    if (out / tag).exists():
        raise CheckpointError(f"{out / tag} is there already: choose another tag or folder")
    about = encode_about(about)
    unfinished = Unfinished.begin(out, tag)
    try:
        dcp.save(state, checkpoint_id=unfinished.path, no_dist=True)
        return unfinished.complete(about), said
    except BaseException:
        unfinished.give_up()
        raise


def _checked(folder: Path, tag: str | None) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint and its `engine.json`, after checking that all its files are as they were written."""
    tag = find_tag(folder, tag)
    path = folder if tag is None else folder / tag
    if not (path / ABOUT).is_file():
        raise CheckpointError(f"{path} is no checkpoint of an engine: there is no engine.json in it")
    return path, read_about(path)


def _about(steps: StepCounts, **more: Any) -> dict[str, Any]:
    """Return the content of `engine.json` for a checkpoint that no rank wrote; it has no random states."""
    return {
        **{"ranks": 0, "engine": {**progress_at(steps), **more.pop("engine", {})}, "groups": []},
        **{"optimizer": {}, "client_state": {}, "config": {}, "model": {"configs": {}, "tied": {}}, **more},
    }


def _of_safetensors(source: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Return all weights, which are mapped and not read yet."""
    state: dict[str, Tensor] = {}
    for file in weight_paths(source):
        try:
            with safe_open(file, framework="pt") as opened:
                state |= {f"model.{name}": opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
    configs = {
        name: json.loads((source / name).read_text())
        for name in ("config.json", "generation_config.json")
        if (source / name).is_file()
    }
    about = _about(StepCounts(), model={"configs": configs, "tied": {}})
    return state, about, {"from": "safetensors", "weights": len(state)}


def _of_deepspeed(found: DeepSpeedCheckpoint) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    state = {f"model.{name}": value for name, value in found.masters.items()}
    state |= {f"model.{name}": found.masters[first] for name, first in found.tied.items()}
    state |= {f"optimizer.{name}.{key}": value for name, kept in found.averages.items() for key, value in kept.items()}
    client, dropped = {}, []
    for key, value in found.client.items():
        try:
            encode(value, key)
        except CheckpointError:
            dropped.append(key)
        else:
            client[key] = value
    engine = {"loss_scale": found.loss_scale, "schedule": found.schedule}
    counts = StepCounts(found.steps * found.micro_batches, found.steps, found.skipped)
    about = _about(
        counts,
        engine=engine,
        groups=found.groups,
        client_state=client,
        model={"configs": {}, "tied": found.tied},
    )
    said = {
        **{"from": f"DeepSpeed, stage {found.stage}, {found.ranks} ranks", "weights": len(found.masters)},
        **{"steps": found.steps, "left out of client_state": dropped},
    }
    return state, about, said

"""Reads DeepSpeed's ZeRO checkpoints, stages 1 to 3, without DeepSpeed and without running code from them.

The files are pickles. Only tensors, plain values and the four classes of DeepSpeed's that are listed here are read, and
these become plain values: torch's `weights_only` refuses all else.

The content of the files of rank r (source: DeepSpeed 0.19.8, `utils/zero_to_fp32.py` and `state_dict` of its
optimizers):

    stages 1, 2   each group of parameters is one flat vector: `param_shapes` has the order, with
                  `param_alignment_paddings` after each parameter. Rank r has the r-th of as many equal parts, the
                  last of them padded
    stage 3       each parameter is one flat vector of which rank r has the r-th of as many equal parts, the last of
                  them padded; rank r's parts of all parameters follow each other over its `fp32_flat_groups`

The averages of Adam are stored like the masters.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsgraph.utils.errors import CheckpointError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "ds_universal_checkpoint_info"),
}
_GROUP_KEYS = {"lr", "betas", "eps", "weight_decay", "initial_lr", "amsgrad", "maximize", "momentum", "nesterov"}


class _Fields:
    """A placeholder for an object of DeepSpeed's, with its contents as attributes."""

    def __init__(self, *values: Any, **fields: Any) -> None:
        self.__dict__.update(fields, values=values)


_STAND_INS = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Fields, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Fields, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Fields, "deepspeed.utils.tensor_fragment.fragment_address"),
]


@dataclass
class DeepSpeedCheckpoint:
    """The content of a ZeRO checkpoint of DeepSpeed, assembled.

    Attributes:
        stage: Its ZeRO stage.
        ranks: Number of ranks that wrote it.
        masters: Full parameters and buffers by name; masters are float32.
        averages: State of the optimizer for each parameter: tensors of its shape, and `step`.
        groups: Options of each group of parameters.
        tied: For each name that shares its parameter with another, the other name.
        steps, skipped, micro_batches: How far training was; `micro_batches` are those of a step.
        schedule: State of the schedule, if there was one.
        loss_scale: State of a dynamic loss scale, in the form of `LossScale`; empty for any other.
        client: Further values that were saved with it.
    """

    stage: int
    ranks: int
    masters: dict[str, Tensor]
    averages: dict[str, dict[str, Tensor]]
    groups: list[dict[str, Any]]
    tied: dict[str, str]
    steps: int
    skipped: int
    micro_batches: int
    schedule: dict[str, Any] | None
    loss_scale: dict[str, float | int] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)


def is_deepspeed(folder: Path) -> bool:
    """Return whether a folder is a ZeRO checkpoint of DeepSpeed's, or contains one that its file `latest` names."""
    return _tag_folder(folder) is not None


def read_deepspeed(folder: Path) -> DeepSpeedCheckpoint:
    """Assemble a checkpoint. Files are mapped, and tensors that keep their order are not copied.

    Args:
        folder: The folder of one checkpoint, or of several with a file `latest`.

    Raises:
        CheckpointError: Files are missing or cannot be read, or its kind is not supported.
    """
    path = _tag_folder(folder)
    if path is None:
        raise CheckpointError(f"{folder} holds no *_optim_states.pt of DeepSpeed's ZeRO stages")
    optimizers = [_loaded(file)["optimizer_state_dict"] for file in _optimizer_files(path)]
    stage, ranks = int(optimizers[0]["zero_stage"]), len(optimizers)
    models = [_loaded(path / _model_file(stage, rank)) for rank in range(ranks if stage == 3 else 1)]
    about = models[0]
    if stage < 3 and len(about["param_shapes"]) != len(optimizers[0][_flat_key(stage)]):
        raise CheckpointError(f"{path}: its groups of parameters and their masters differ in number")
    base = [saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] for saved in optimizers]
    paddings = optimizers[0].get("param_alignment_paddings")
    read = _read_rows if stage == 3 else partial(_read_groups, paddings=paddings)
    masters = dict(read([saved[_flat_key(stage)] for saved in optimizers], about["param_shapes"]))
    averages: dict[str, dict[str, Tensor]] = {name: {} for name in masters}
    for key in _averaged(base[0], path):
        flat = [[state[key] for _, state in sorted(saved["state"].items())] for saved in base]
        for name, tensor in read(flat, about["param_shapes"]):
            averages[name][key] = tensor
    for names, step in zip(about["param_shapes"], _steps(base[0], len(about["param_shapes"])), strict=True):
        for name in names:
            averages[name] |= {} if step is None else {"step": torch.tensor(step)}
    return DeepSpeedCheckpoint(
        stage,
        ranks,
        {**masters, **dict(_others(models, masters, stage))},
        averages,
        [{key: value for key, value in group.items() if key in _GROUP_KEYS} for group in base[0]["param_groups"]],
        dict(about["shared_params"] or {}),
        steps=about["global_steps"],
        skipped=about["skipped_steps"],
        micro_batches=_micro_batches(about["ds_config"]),
        schedule=about["lr_scheduler"],
        loss_scale=_loss_scale(optimizers[0]),
        client={key: value for key, value in about.items() if key not in _OWN_KEYS},
    )


def _tag_folder(folder: Path) -> Path | None:
    latest = folder / "latest"
    path = folder / latest.read_text().strip() if latest.is_file() else folder
    return path if any(_OPTIMIZER_FILE.fullmatch(file.name) for file in path.glob("*.pt")) else None


def _optimizer_files(path: Path) -> list[Path]:
    found: dict[int, Path] = {}
    for file in path.glob("*_optim_states.pt"):
        matched = _OPTIMIZER_FILE.fullmatch(file.name)
        if matched is None or int(matched[2]) != 0:
            raise CheckpointError(f"{file} is from tensor or expert parallelism, which dsgraph cannot read")
        found[int(matched[1])] = file
    count = _loaded(found[min(found)])["optimizer_state_dict"].get("partition_count")
    count = max(count) if isinstance(count, list) else count
    missing = sorted(set(range(count or len(found))) - set(found))
    if missing:
        raise CheckpointError(f"{path}: {count} ranks wrote it, and the file of rank {missing[0]} is missing")
    return [found[rank] for rank in sorted(found)]


def _model_file(stage: int, rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"


def _flat_key(stage: int) -> str:
    return "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"


def _loaded(file: Path) -> dict[str, Any]:
    """Load one file without running code from it.

    Raises:
        CheckpointError: It is missing or damaged, or contains something besides tensors and plain values.
    """
    try:
        with torch.serialization.safe_globals(_STAND_INS):  # type: ignore[arg-type]
            found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds a {named[1]}, which is not read: only tensors and plain values are" if named else "is damaged"
        raise CheckpointError(f"{file} {what}") from error
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{file} is damaged: {' '.join(str(error).split())[:200]}") from error
    return found


def _averaged(base: dict[str, Any], path: Path) -> list[str]:
    """Return the names of the tensors that the optimizer keeps for each element."""
    if not isinstance(base.get("state"), dict):
        raise CheckpointError(f"{path} was saved with elastic_checkpoint, which dsgraph cannot read")
    first: dict[str, Any] = next(iter(base["state"].values()), {})
    return [key for key, value in first.items() if isinstance(value, Tensor) and value.dim() == 1 and key != "step"]


def _steps(base: dict[str, Any], groups: int) -> list[float | None]:
    """Return the step count of each group; some optimizers store it for each flat tensor, others for each group."""
    found = [state.get("step") for _, state in sorted(base["state"].items())]
    if not any(step is not None for step in found):
        found = [group.get("step") for group in base["param_groups"]]
    return [None if step is None else float(step) for step in (found + found[-1:] * groups)[:groups]]


def _read_groups(
    flat: Sequence[Sequence[Tensor]], shapes: Sequence[dict[str, Any]], *, paddings: Sequence[Sequence[int]] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters of stages 1 and 2, from each rank's part of each group."""
    for group, names in enumerate(shapes):
        whole = torch.cat([parts[group].flatten() for parts in flat])
        behind = paddings[group] if paddings is not None else [0] * len(names)  # older versions have none
        offset = 0
        for (name, shape), padding in zip(names.items(), behind, strict=True):
            size = math.prod(shape)
            yield name, whole[offset : offset + size].view(shape)
            offset += size + padding


def _read_rows(flat: Sequence[Sequence[Tensor]], shapes: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters of stage 3, from each rank's parts of all parameters."""
    mine = [torch.cat([part.flatten() for part in parts]) if len(parts) > 1 else parts[0].flatten() for parts in flat]
    offset = 0
    for name, shape in chain.from_iterable(names.items() for names in shapes):
        size = math.prod(shape)
        part = math.ceil(size / len(mine))
        yield name, torch.cat([rows[offset : offset + part] for rows in mine])[:size].view(shape)
        offset += part


def _others(models: Sequence[dict[str, Any]], masters: dict[str, Tensor], stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers and frozen parameters."""
    about = models[0]
    for name, value in about["module"].items():
        is_whole = stage < 3 or name in about["buffer_names"]
        if is_whole and name not in masters and name not in (about["shared_params"] or {}):
            yield name, value
    for name, shape in (about["frozen_param_shapes"] or {}).items() if stage == 3 else ():
        parts = [model["frozen_param_fragments"][name].flatten() for model in models]
        yield name, torch.cat(parts)[: math.prod(shape)].view(shape)


def _micro_batches(config: Any) -> int:
    """Return the micro-batches of a step; the files contain the configuration, or its path."""
    return int(config.get("gradient_accumulation_steps") or 1) if isinstance(config, dict) else 1


def _loss_scale(saved: dict[str, Any]) -> dict[str, float | int]:
    scaler = vars(saved["loss_scaler"]) if saved.get("dynamic_loss_scale") else {}
    if "cur_iter" not in scaler:
        return {}
    return {
        "scale": float(scaler["cur_scale"]),
        "overflows_left": scaler["cur_hysteresis"],
        "steps": scaler["cur_iter"],
        "last_overflow": scaler["last_overflow_iter"],
    }

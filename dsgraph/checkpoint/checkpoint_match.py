"""Checks that a checkpoint is of the same model and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch.optim import Optimizer

from .model_tensors import ModelTensors
from .step_counts import StepCounts

MODEL_ALONE = "load_module_only=True takes the model alone (PipelinedModel.load_checkpoint: leave optimizer out)"


def class_of(optimizer: Any) -> str | None:
    """Return the name of an optimizer's class; None without one."""
    if optimizer is None:
        return None
    while hasattr(optimizer, "inner"):  # of one that gathers whole parameters for another
        optimizer = optimizer.inner
    return type(optimizer).__name__


def why_damaged(about: Mapping[str, Any]) -> str:
    """Return which entry of `engine.json` is missing or has a wrong type; empty if none."""
    if about.get("kind") == "parallel layout":
        return (
            "an earlier version of dsgraph wrote it for a parallel layout, in a format that is not supported any more: "
            "load it with that version, or train again"
        )
    kinds: dict[str, type] = {
        **{"ranks": int, "groups": list, "optimizer": dict, "client_state": dict, "engine": dict, "model": dict}
    }
    for key, kind in kinds.items():
        if not isinstance(about.get(key), kind):
            return f"engine.json has no {key!r} that is a {kind.__name__}: load another checkpoint by its tag"
    counts = about["engine"].get("counts")
    names = {field.name for field in fields(StepCounts)}
    if not isinstance(counts, dict) or counts.keys() != names or not all(type(n) is int for n in counts.values()):
        return f"engine.json has no 'counts' of {', '.join(sorted(names))}: load another checkpoint by its tag"
    return ""


def why_no_client_state(value: object) -> str:
    """Return why a value cannot be the `client_state` of a checkpoint; empty if it can."""
    if value is None or isinstance(value, Mapping):
        return ""
    return f"client_state is a {type(value).__name__}; expected a dict. Use client_state={{'state': ...}}"


def other_optimizer(optimizer: Optimizer | None, about: Mapping[str, Any]) -> str:
    """Return how the optimizer of a checkpoint differs in its arguments; empty if it does not."""
    saved, mine = about.get("optimizer_class"), class_of(optimizer)  # of an import the class is not known
    own = set() if optimizer is None else optimizer.param_groups[0].keys() - {"params", "initial_lr"}
    if saved in (None, mine) or (about["groups"] and own <= about["groups"][0].keys()):
        return ""
    return f"its optimizer is {saved}, and the engine's is {mine}"


def other_model(tensors: ModelTensors, known: Mapping[str, Any], *, module_only: bool) -> tuple[str, list[str]]:
    """Return how the model of a checkpoint differs.

    If only the model is loaded, tensors that the model does not have may stay in the checkpoint: files of weights may
    contain buffers that the model no longer has.

    Args:
        tensors: The tensors of the model.
        known: The metadata of each tensor in the checkpoint.
        module_only: True if only the model is loaded.

    Returns:
        Why it cannot be loaded, empty if it can; and the names of the tensors that stay there.
    """
    saved = {key[len("model.") :]: about.size for key, about in known.items() if key.startswith("model.")}
    for name, shape in tensors.sizes.items():
        if name not in saved and tensors.tied.get(name) not in saved:
            return f"there is no {name!r} in it, which the model has", []
        if saved.get(name, shape) != shape:
            return f"{name!r} is {list(saved[name])} in it, and {list(shape)} in the model", []
    more = [name for name in saved if name not in tensors.sizes and name not in tensors.tied]
    if more and not module_only:
        return f"there is {more[0]!r} in it, which the model has not", []
    return "", more

"""Whether a checkpoint is of the engine's model and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .step_counts import StepCounts


def class_of(optimizer: Any) -> str:
    """The name of an optimizer's class."""
    while hasattr(optimizer, "inner"):  # of one that gathers whole parameters for another
        optimizer = optimizer.inner
    return type(optimizer).__name__


def why_damaged(about: Mapping[str, Any]) -> str:
    """Return which entry of an engine's checkpoint is missing or has a wrong type; empty if none."""
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


def other_optimizer(optimizer: Optimizer, about: Mapping[str, Any]) -> str:
    """How the optimizer of a checkpoint differs from the engine's in what it takes; empty where it does not."""
    saved, mine = about.get("optimizer_class"), class_of(optimizer)  # of an import the class is not known
    own = optimizer.param_groups[0].keys()
    if saved in (None, mine) or own - {"params", "initial_lr"} <= about["groups"][0].keys():
        return ""
    return f"its optimizer is {saved}, and the engine's is {mine}"


def other_model(
    module: nn.Module, known: Mapping[str, Any], tied: Mapping[str, str], *, module_only: bool
) -> tuple[str, list[str]]:
    """How the model of a checkpoint differs from the engine's.

    What is only in the checkpoint may be left there by those who take the model alone: files of weights hold buffers
    that the model has lost since.

    Args:
        module: The engine's model.
        known: What the checkpoint says of each of its tensors.
        tied: Names of the model's parameters that are others under a second name.
        module_only: Whether the model alone is taken.

    Returns:
        Why it cannot be taken, empty where it can; and the names of what is left there.
    """
    saved = {key[len("model.") :]: about.size for key, about in known.items() if key.startswith("model.")}
    mine = {name: value.shape for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    for name, shape in mine.items():
        if name not in saved and tied.get(name) not in saved:
            return f"there is no {name!r} in it, which the model has", []
        if saved.get(name, shape) != shape:
            return f"{name!r} is {list(saved[name])} in it, and {list(shape)} in the model", []
    more = [name for name in saved if name not in mine]
    if more and not module_only:
        return f"there is {more[0]!r} in it, which the model has not", []
    return "", more

"""`"auto"` in a configuration, filled from transformers' `TrainingArguments` as in its DeepSpeed integration."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from dsgraph.utils.errors import ConfigError

_ALWAYS = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
)
"""Taken from the arguments where the configuration says nothing: else the argument would have no effect."""


def filled(
    source: str | PathLike[str] | Mapping[str, Any], args: Any, *, hidden_size: int | None, steps: int
) -> dict[str, Any]:
    """A configuration without `"auto"`s that the arguments answer.

    Args:
        source: A JSON file, or what would stand in it.
        args: `transformers.TrainingArguments`.
        hidden_size: The model's, of which bucket sizes follow.
        steps: Optimizer steps of the training.

    Raises:
        ConfigError: The configuration and the arguments contradict each other, or a bucket size is "auto" and the model
            has no hidden size.
    """
    config = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else json.loads(Path(source).read_text())
    contradictions = []
    for path, (value, argument) in _answers(args, steps).items():
        *sections, key = path.split(".")
        section: Any = config
        for name in sections:
            is_there = isinstance(section, dict) and isinstance(section.get(name), dict)
            if path in _ALWAYS and not is_there:
                section[name] = {}
            section = section.get(name) if isinstance(section, dict) else None
        if section is None or (key not in section and path not in _ALWAYS):
            continue
        if section.setdefault(key, "auto") == "auto":
            section[key] = value
        elif section[key] != value:
            contradictions.append(f"{path} is {section[key]!r} and {argument} {value!r}")
    if contradictions:
        raise ConfigError(
            f'config: {"; ".join(contradictions)}, of TrainingArguments: write the same twice, or "auto" here'
        )
    _fill_buckets(config.get("zero_optimization"), hidden_size)
    return config


def _answers(args: Any, steps: int) -> dict[str, tuple[Any, str]]:
    """What the arguments say to each key, and which argument says it."""
    micro, times = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": (micro, "per_device_train_batch_size"),
        "gradient_accumulation_steps": (times, "gradient_accumulation_steps"),
        "train_batch_size": (micro * times * args.world_size, "the batch of all ranks"),
        "gradient_clipping": (args.max_grad_norm, "max_grad_norm"),
        "optimizer.params.lr": (args.learning_rate, "learning_rate"),
        "optimizer.params.betas": ([args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2"),
        "optimizer.params.eps": (args.adam_epsilon, "adam_epsilon"),
        "optimizer.params.weight_decay": (args.weight_decay, "weight_decay"),
        "scheduler.params.warmup_max_lr": (args.learning_rate, "learning_rate"),
        "scheduler.params.total_num_steps": (steps, "the number of steps"),
        "scheduler.params.warmup_num_steps": (max(1, args.get_warmup_steps(steps)), "warmup_steps"),
        "fp16.enabled": (bool(args.fp16 or args.fp16_full_eval), "fp16"),
        "bf16.enabled": (bool(args.bf16 or args.bf16_full_eval), "bf16"),
    }


def _fill_buckets(zero: Any, hidden_size: int | None) -> None:
    if not isinstance(zero, dict):
        return
    for key, of in (
        ("reduce_bucket_size", lambda size: size * size),
        ("stage3_param_persistence_threshold", lambda size: 10 * size),
    ):
        if zero.get(key) != "auto":
            continue
        if hidden_size is None:
            raise ConfigError(f'zero_optimization.{key} is "auto", and the model has no hidden size: write a number')
        zero[key] = of(hidden_size)

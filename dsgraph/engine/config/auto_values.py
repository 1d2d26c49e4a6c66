"""Replacement of `"auto"` in a configuration by transformers' `TrainingArguments`, as in its DeepSpeed integration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

from dsgraph.utils.errors import ConfigError

from .engine_config import EngineConfig
from .key import Auto, FromHiddenSize, entries_of, name_of, spellings_of
from .read_config import load_config


def filled(
    source: str | PathLike[str] | Mapping[str, Any], args: Any, *, hidden_size: int | None, steps: int
) -> dict[str, Any]:
    """Return a configuration in which `"auto"` values that follow from the arguments are replaced.

    Args:
        source: A JSON file, or its content.
        args: `transformers.TrainingArguments`.
        hidden_size: The model's, from which bucket sizes follow.
        steps: Optimizer steps of the training.

    Raises:
        ConfigError: The configuration and the arguments contradict each other, or a bucket size is "auto" and the model
            has no hidden size.
    """
    config = load_config(source)
    contradictions = []
    for path, auto, fills in _auto_values():
        *sections, key = path.split(".")
        section = _section(config, sections, fills=fills)
        if section is None or (key not in section and not fills):
            continue
        is_auto = section.setdefault(key, "auto") == "auto"
        if isinstance(auto, FromHiddenSize):
            if is_auto and hidden_size is None:
                raise ConfigError(f'{path} is "auto", and the model has no hidden size: write a number')
            value = auto.value(hidden_size) if is_auto and hidden_size is not None else section[key]
        else:
            value = getattr(args, auto) if isinstance(auto, str) else auto.value(args, steps)
        if is_auto:
            section[key] = value
        elif section[key] != value:
            contradictions.append(f"{path} is {section[key]!r} and {name_of(auto)} {value!r}")
    if contradictions:
        raise ConfigError(
            f'config: {"; ".join(contradictions)}in TrainingArguments: write the same value in both, or "auto" here'
        )
    return config


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in which `"auto"` is replaced by the value at its place, unless that is None."""
    found = {key: values[key] if own == "auto" and values.get(key) is not None else own for key, own in config.items()}
    sections = [key for key, own in config.items() if isinstance(own, Mapping) and isinstance(values.get(key), Mapping)]
    return found | {key: with_values(config[key], values[key]) for key in sections}


def _auto_values() -> Iterator[tuple[str, Auto, bool]]:
    """Yield the keys that may be "auto", what it means, and whether it is so without the key too."""
    for path, field, entry in entries_of(EngineConfig):
        if isinstance(entry.auto, Mapping):
            yield from ((f"{path}.{inner}", auto, False) for inner, auto in entry.auto.items())
        elif entry.auto is not None:
            for spelling in spellings_of(path, field):
                yield spelling, entry.auto, not isinstance(entry.auto, FromHiddenSize)


def _section(config: dict[str, Any], path: list[str], *, fills: bool) -> dict[str, Any] | None:
    """Return a section of the file, or None; with `fills` it is made if it is missing."""
    found: Any = config
    for name in path:
        if fills and not isinstance(found.get(name), dict):
            found[name] = {}
        found = found.get(name)
        if not isinstance(found, dict):
            return None
    return found

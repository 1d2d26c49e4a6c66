"""The options that a configuration sets: of `partition` and of the backend."""

from __future__ import annotations

from typing import Any, Literal

from dsgraph.compiler.build_pipeline import bind_options
from dsgraph.compiler.options import parse_options
from dsgraph.utils.errors import ConfigError, OptionError

from .engine_config import EngineConfig
from .key import entries_of, is_set, value_at


def partition_options(settings: EngineConfig) -> dict[str, Any]:
    """Return the arguments of `partition`."""
    found = {"stage": settings.zero_optimization.stage, **_set_by_keys(settings, "argument")}
    if "param_dtype" in found:
        found["cast_forward_inputs"] = False  # the engine casts them, before the compiled model
    return found


def backend_options(settings: EngineConfig) -> dict[str, Any]:
    """Return the options of the backend.

    Raises:
        ConfigError: Options contradict each other, or `dsgraph.pipeline` names passes that cannot run.
    """
    found = _set_by_keys(settings, "option")
    try:
        bind_options(parse_options(found, {}))
    except OptionError as error:
        raise ConfigError(f"dsgraph.pipeline: {error.__cause__}" if error.__cause__ else str(error)) from None
    return found


def _set_by_keys(settings: EngineConfig, what: Literal["option", "argument"]) -> dict[str, Any]:
    """Return what the keys set that differ from their defaults."""
    found: dict[str, Any] = {}
    for path, field, entry in entries_of(EngineConfig):
        name = getattr(entry, what)
        if name and is_set(settings, path, field):
            value = value_at(settings, path)
            found[name] = value if entry.value is None else entry.value(value, settings)
    return {name: value for name, value in found.items() if value is not None}

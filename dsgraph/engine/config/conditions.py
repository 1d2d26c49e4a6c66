"""Checks the conditions of configuration keys: combinations that are refused, and keys without effect; see `Needs`."""

from __future__ import annotations

import json

from dsgraph.utils.errors import ConfigError

from .engine_config import EngineConfig
from .key import MODEL_DEVICE, Needs, entries_of, is_set, value_at


def check_keys(config: EngineConfig, device: str | None = None) -> list[str]:
    """Check the conditions of all keys that differ from their defaults.

    Args:
        config: The configuration.
        device: The type of the device of the model; None leaves out the conditions on it.

    Returns:
        A line for each key that has no effect.

    Raises:
        ConfigError: Names the first two keys that cannot be combined.
    """
    notes: dict[str, None] = {}
    for path, field, entry in entries_of(EngineConfig):
        if not is_set(config, path, field):
            continue
        if config.has_stages and not entry.stages:
            raise ConfigError(f"{path} is not supported with pipeline stages (`parallel.pp`): remove one of the two")
        for needs in entry.needs:
            problem = _problem(config, path, needs, device)
            if problem and not needs.note:
                raise ConfigError(problem)
            if problem:
                notes[problem] = None
    return list(notes)


def _problem(config: EngineConfig, path: str, needs: Needs, device: str | None) -> str:
    """Return the message for a condition that does not hold; empty if it holds."""
    value = value_at(config, path)
    if needs.only not in (None, value) or (needs.not_for is not None and value == needs.not_for):
        return ""
    if needs.unless and value_at(config, needs.unless):
        return ""
    other = f"{path.rpartition('.')[0]}{needs.key}" if needs.key.startswith(".") else needs.key
    found = device if other == MODEL_DEVICE else value_at(config, other)
    if (other == MODEL_DEVICE and device is None) or needs.holds_for(found):
        return ""
    state = f"is {json.dumps(found)}" if found is not None else "is not set"
    if needs.note:
        return f"{path} {needs.note}: {other} {state}, and {needs.why}"
    own = path if needs.only is None else f"{path} {json.dumps(value)}"
    wanted = f"{needs.values_text}, and it {state}" if needs.values_text else "as well"
    return f"{own} needs {other} {wanted}: {needs.why}. Change one of the two"

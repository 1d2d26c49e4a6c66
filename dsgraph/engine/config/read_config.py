"""Reads the engine's configuration: a file or a dict becomes an `EngineConfig`, and what it says is accounted for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import AliasChoices, BaseModel, ValidationError

from dsgraph.utils.errors import ConfigError
from dsgraph.utils.nearest import SYNONYMS, near, nearest

from .batch_sizes import BatchSizes
from .engine_config import EngineConfig, section_of
from .other_keys import NOT_YET, WITHOUT_EFFECT

_OF_GRAPHS = {"codegen", "pipeline", "memory_limit", "kernels", "strict"}
"""Keys of the section `dsgraph` that only a compiled model heeds."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration that can be run.

    Attributes:
        config: What the file says, with defaults.
        batch: The three batch sizes.
        notes: One line for each key that has no effect, and for each `"auto"` that was left to its default.
    """

    config: EngineConfig
    batch: BatchSizes
    notes: tuple[str, ...]


def read_config(
    source: str | PathLike[str] | Mapping[str, Any],
    *,
    ranks: int | None,
    sections: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> ResolvedConfig:
    """Reads and checks a configuration.

    Args:
        source: A JSON file, or what would stand in it.
        ranks: Data-parallel ranks, over which `train_batch_size` counts; None: those of the section `parallel`.
        sections: Sections whose keys go before those of the source.

    Raises:
        ConfigError: A file that cannot be read, a key or a value that is wrong, batch sizes that contradict each other.
    """
    given = load_config(source)
    for name, section in sections.items():
        given[name] = {**(given.get(name) or {}), **section}
    notes: list[str] = []
    config = _validated(given, notes)
    if config.fp16.enabled and config.bf16.enabled:
        raise ConfigError("fp16.enabled and bf16.enabled are both true: choose one")
    if config.flops_profiler.enabled and not config.dsgraph.compile:
        raise ConfigError("flops_profiler.enabled counts graphs, and dsgraph.compile is false: there are none")
    if not config.steps_per_print:
        silent = [key for key in ("wall_clock_breakdown", "memory_breakdown") if getattr(config, key)]
        notes += [f"{key}: nothing is printed without steps_per_print" for key in silent]
    if not config.dsgraph.compile:
        idle = config.dsgraph.model_fields_set & _OF_GRAPHS
        notes += [f"dsgraph.{key} has no effect: dsgraph.compile is false" for key in sorted(idle)]
    batch = BatchSizes.solve(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        ranks=config.parallel.dp if ranks is None else ranks,
    )
    return ResolvedConfig(config, batch, tuple(notes))


def check_section(name: str, section: Mapping[str, Any]) -> None:
    """Checks one section by itself.

    Raises:
        ConfigError: As `read_config`.
    """
    _validated({name: section}, [])


def _validated(given: Mapping[str, Any], notes: list[str]) -> EngineConfig:
    try:
        return EngineConfig.model_validate(_kept(given, "", notes))
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None


def load_config(source: str | PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """What stands in a configuration, before anything is checked.

    Raises:
        ConfigError: It cannot be read.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, PathLike)):
        raise ConfigError(f"config is {source!r}; it takes the path of a JSON file or a dict")
    path = Path(fspath(source))
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    try:
        found = json.loads(text, object_pairs_hook=_refuse_repeated)
    except json.JSONDecodeError as error:
        raise ConfigError(f"config file {path}, line {error.lineno}: no JSON ({error.msg})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"config file {path} holds a {type(found).__name__}; it takes an object of sections")
    return found


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"config: {key!r} stands there twice: remove one")
        found[key] = value
    return found


def _kept(given: Mapping[str, Any], path: str, notes: list[str]) -> dict[str, Any]:
    """The keys that say something, each of the others with a note."""
    kept: dict[str, Any] = {}
    for key, value in given.items():
        where = f"{path}{key}"
        if value == "auto" and where != "dsgraph.kernels" and _is_known(where):
            notes.append(f'{where}: "auto" is the default here')
        elif where in WITHOUT_EFFECT:
            notes.append(f"{where} has no effect: {WITHOUT_EFFECT[where]}")
        elif where in NOT_YET:
            if not _is_off(where, value):
                raise ConfigError(f"{where}: {NOT_YET[where]} is not there yet: remove the key")
        else:
            kept[key] = _kept(value, f"{where}.", notes) if isinstance(value, Mapping) else value
    return kept


def _is_known(where: str) -> bool:
    """Whether a key may stand in its section; of what has no section of its own any may."""
    *path, last = where.split(".")
    section: type[BaseModel] | None = EngineConfig
    for key in path:
        if section is None or key not in section.model_fields:
            return True  # parameters of an optimizer or a schedule, or of a section that is refused as a whole
        section = section_of(section.model_fields[key])
    return section is None or last in _keys_of(path) or last in _aliases_of(section)


def _aliases_of(section: type[BaseModel]) -> Iterator[str]:
    for field in section.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            yield from map(str, field.validation_alias.choices)


def _is_off(where: str, value: object) -> bool:
    """Whether what is not there yet is switched off in so many words."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or value.get("device") == "none"
    return value is False or value is None or (where == "zero_optimization.zero_hpz_partition_size" and value == 1)


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    name = ".".join(where)
    if first["type"] == "extra_forbidden":
        known = list(_keys_of(where[:-1]))
        hint = nearest(where[-1], known) or _elsewhere(where[-1])
        return f"config: unknown key {name!r}{hint}; known here: {', '.join(sorted(known))}"
    if first["type"] == "missing":
        return f"config: {name} is missing: set it"
    if first["type"] in ("model_type", "dict_type"):
        return f"config: {name} is {first['input']!r}; expected a section, which is an object of keys and values"
    message = first["msg"].removeprefix("Value error, ")
    return f"config: {name} is {first['input']!r}: {message[0].lower()}{message[1:]}"


def _elsewhere(key: str) -> str:
    """Return a question that names the one section with such a key; empty if several have it, or none."""
    sections = {name: section_of(field) for name, field in EngineConfig.model_fields.items()}
    found = [
        f"{name}.{match}"
        for name, section in sections.items()
        if section is not None
        for match in near(key, section.model_fields)[:1]
        if match == key or key.lower() in SYNONYMS
    ]
    if found:
        return f"; did you mean {found[0]!r}?" if len(found) == 1 else ""
    return nearest(key, EngineConfig.model_fields, where="at the top")


def _keys_of(path: list[str]) -> Iterator[str]:
    section: type[BaseModel] | None = EngineConfig
    for key in path:
        section = section_of(section.model_fields[key]) if section is not None else None
    yield from section.model_fields if section is not None else ()
    prefix = "".join(f"{key}." for key in path)
    for other in [*WITHOUT_EFFECT, *NOT_YET]:
        if other.startswith(prefix) and "." not in other[len(prefix) :]:
            yield other[len(prefix) :]

"""Reads the engine's configuration: a file or a dict becomes an `EngineConfig`, and ineffective keys are reported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dsgraph.utils.errors import ConfigError
from dsgraph.utils.nearest import SYNONYMS, near, nearest

from .batch_sizes import BatchSizes
from .conditions import check_keys
from .engine_config import EngineConfig, ParallelConfig
from .key import section_of, spellings_of
from .other_keys import NOT_YET, OFF, OLD_NAMES, WITHOUT_EFFECT


@dataclass(frozen=True)
class ResolvedConfig:
    """A checked configuration.

    Attributes:
        config: The values of the file, with defaults.
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
    device: str | None = None,
    sections: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> ResolvedConfig:
    """Read and check a configuration.

    Args:
        source: A JSON file, or its content.
        ranks: Number of data-parallel ranks, for `train_batch_size`; None: those of the section `parallel`.
        device: The type of the device of the model; None checks no conditions on it.
        sections: Sections whose keys override those of the source.

    Raises:
        ConfigError: A file that cannot be read, a key or a value that is wrong, keys that cannot be
            combined, batch sizes that contradict each other.
    """
    given = load_config(source)
    for name, section in sections.items():
        given[name] = {**(given.get(name) or {}), **section}
    notes: list[str] = []
    config = _validated(given, notes)
    notes += check_keys(config, device)
    batch = BatchSizes.solve(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        ranks=config.parallel.dp if ranks is None else ranks,
    )
    return ResolvedConfig(config, batch, tuple(notes))


def parallel_section(source: str | PathLike[str] | Mapping[str, Any]) -> ParallelConfig | None:
    """Return the section `parallel` of a configuration, before its ranks are known; None if it has none.

    Raises:
        ConfigError: As `read_config`.
    """
    config = _validated(load_config(source), [])
    return config.parallel if config.is_parallel else None


def check_section(name: str, section: Mapping[str, Any]) -> None:
    """Check one section by itself.

    Raises:
        ConfigError: As `read_config`.
    """
    _validated({name: section}, [])


def _validated(given: Mapping[str, Any], notes: list[str]) -> EngineConfig:
    try:
        return EngineConfig.model_validate(_kept(given, notes, section=EngineConfig))
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None


def load_config(source: str | PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a configuration without comments, before anything is checked.

    Raises:
        ConfigError: It cannot be read, or has a key under its old and its new name.
    """
    if isinstance(source, Mapping):
        return _renewed(source)
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
        raise ConfigError(f"config file {path}, line {error.lineno}: not JSON ({error.msg})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"config file {path} holds a {type(found).__name__}; it takes an object of sections")
    return _renewed(found)


def _renewed(given: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a section without comments, which are keys that begin with "_", and with present names for old ones."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        new, sections = OLD_NAMES.get(f"{path}{key}", (key, ()))
        if new != key and new in given:
            raise ConfigError(f"config: {path}{key} is the old name of {path}{new}, which is set too: remove one")
        value = sections[value] if sections and isinstance(value, bool) else value
        if not str(key).startswith("_"):
            found[new] = _renewed(value, f"{path}{new}.") if isinstance(value, Mapping) else value
    return found


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"config: the key {key!r} appears twice: remove one")
        found[key] = value
    return found


def _kept(
    given: Mapping[str, Any], notes: list[str], *, section: type[BaseModel] | None, path: str = ""
) -> dict[str, Any]:
    """Return the keys that have an effect, and note each of the others.

    Args:
        given: The keys of a section of the file.
        notes: Extended by a line for each key that is left out.
        section: Its class; None if any key is allowed, as for the parameters of an optimizer.
        path: The path of the section, with a dot at its end.
    """
    kept: dict[str, Any] = {}
    for key, value in given.items():
        where, field = f"{path}{key}", _field(section, key)
        is_known = section is None or field is not None or where in WITHOUT_EFFECT or where in NOT_YET
        if value == "auto" and is_known and not (field and _takes_auto(field)):
            notes.append(f'{where}: "auto" is the default here')
        elif where in WITHOUT_EFFECT:
            notes.append(f"{where} has no effect: {WITHOUT_EFFECT[where]}")
        elif where in NOT_YET:
            if not _is_off(where, value):
                raise ConfigError(f"{where}: {NOT_YET[where]} is not supported yet: remove the key")
        elif isinstance(value, Mapping):
            kept[key] = _kept(value, notes, section=section_of(field) if field else None, path=f"{where}.")
        else:
            kept[key] = value
    return kept


def _field(section: type[BaseModel] | None, key: str) -> FieldInfo | None:
    fields = section.model_fields.items() if section is not None else ()
    return next((field for name, field in fields if key == name or key in spellings_of(name, field)), None)


def _takes_auto(field: FieldInfo) -> bool:
    """Return True if "auto" is a value of its own of a key."""
    return any("auto" in get_args(kind) for kind in (field.annotation, *get_args(field.annotation)))


def _is_off(where: str, value: object) -> bool:
    """Return True if a key that is not supported is switched off explicitly."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or value.get("device") == "none"
    return value is False or value is None or (where in OFF and value == OFF[where])


def _describe(error: ValidationError) -> str:
    """Return a line for each unknown key, otherwise one for the first error."""
    unknown = [[*map(str, item["loc"])] for item in error.errors() if item["type"] == "extra_forbidden"]
    if unknown:
        return "\n".join(f"config: unknown key {'.'.join(where)!r}{_hint(where, len(unknown))}" for where in unknown)
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"config: {name} is missing: set it"
    if first["type"] in ("model_type", "dict_type"):
        return f"config: {name} is {first['input']!r}; expected a section, which is an object of keys and values"
    message = first["msg"].removeprefix("Value error, ")
    return f"config: {name} is {first['input']!r}: {message[0].lower()}{message[1:]}"


def _hint(where: list[str], count: int) -> str:
    """Return the name that is meant, or all that are known if it is the only unknown one."""
    known = list(_keys_of(where[:-1]))
    close = nearest(where[-1], known) or _elsewhere(where[-1])
    return close if close or count > 1 else f"; known here: {', '.join(sorted(known))}"


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

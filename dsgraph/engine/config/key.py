"""The entry of a key: its type is the field's annotation, and `key` holds everything else that is known about it.

Documentation, refusals, notes, `"auto"`, backend options and arguments of `partition` are made from these entries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import AliasChoices, BaseModel, Field
from pydantic.fields import FieldInfo

MODEL_DEVICE = "the device of the model"
"""In place of a key in `Needs`: where the model is trained, such as "cpu"."""


@dataclass(frozen=True)
class Needs:
    """A condition of a key that differs from its default: another key has one of these values.

    Attributes:
        key: The path of the other key; one that begins with "." is in the same section.
        values: The values it may have; empty for any that is set.
        why: The reason, which ends the message.
        only: The condition holds for this value of the key alone; None for every value but the default.
        note: What the key lacks otherwise, for a line that is printed; empty for an error.
        other_than: The value that the other key may not have, in place of `values`.
        not_for: The value of the key that needs nothing; None if every value does.
        unless: The path of a key that the engine replaces by the other one: while it is set, nothing is checked.
    """

    key: str
    values: tuple[Any, ...]
    why: str
    only: Any = None
    note: str = ""
    other_than: Any = None
    not_for: Any = None
    unless: str = ""

    @property
    def values_text(self) -> str:
        """The values, as written in the file."""
        if self.other_than is not None:
            return f"other than {json.dumps(self.other_than)}"
        return " or ".join(map(json.dumps, self.values))

    def holds_for(self, found: Any) -> bool:
        """Return True if the other key may have this value."""
        if self.other_than is not None:
            return bool(found != self.other_than)
        return found in self.values if self.values else bool(found)


NO_EFFECT = "has no effect"
"""The default `Needs.note`."""

COMPILED = Needs("dsgraph.compile", (True,), "it is an option of compiled graphs", note=NO_EFFECT)
"""The condition of each key that sets a backend option, unless it has a stricter one."""


@dataclass(frozen=True)
class FromArguments:
    """`"auto"` follows from transformers' `TrainingArguments`.

    Attributes:
        name: The words for what it follows from.
        value: Computes it from the arguments and the number of optimizer steps.
    """

    name: str
    value: Callable[[Any, int], Any]


@dataclass(frozen=True)
class FromHiddenSize:
    """`"auto"` follows from the hidden size of a transformers model.

    Attributes:
        name: The formula, in words.
        value: The formula.
    """

    name: str
    value: Callable[[int], int]


Auto = str | FromArguments | FromHiddenSize
"""A text is the name of the one argument."""


def name_of(auto: Auto) -> str:
    """Return the name of the source of an `"auto"`."""
    return auto if isinstance(auto, str) else auto.name


@dataclass(frozen=True)
class Entry:
    """The properties of a key besides its type, default, bounds and description.

    Attributes:
        option: The backend option that the key sets where it differs from its default.
        argument: The argument of `partition` that the key sets where it differs from its default. A key without
            `option` and `argument` takes effect in the engine.
        value: Converts the value of the key, given the configuration as well; None passes it on. A result of None is
            not passed.
        auto: The meaning of `"auto"` under transformers' `Trainer`. If it follows from arguments, it is also the
            default without the key: the arguments would have no effect otherwise. For a free section, the meaning for
            names in it.
        needs: The conditions of the key.
        stages: True if the key is supported with pipeline stages.
    """

    option: str = ""
    argument: str = ""
    value: Callable[[Any, Any], Any] | None = None
    auto: Auto | Mapping[str, Auto] | None = None
    needs: tuple[Needs, ...] = ()
    stages: bool = False

    def __call__(self, schema: Any) -> None:
        """Add nothing to a JSON schema: pydantic keeps an entry with its field as `json_schema_extra`."""


def key(default: Any, text: str | None = None, **given: Any) -> Any:
    """Return the field of a key.

    Args:
        default: The default; `...` for a key that must be given.
        text: The description; None for a section, which its class describes.
        **given: Attributes of `Entry`, and further arguments of pydantic's `Field`, such as `ge`.
    """
    entry = Entry(**{name: given.pop(name) for name in Entry.__dataclass_fields__ if name in given})
    if entry.option and all(other.key != COMPILED.key for other in entry.needs):
        entry = replace(entry, needs=(*entry.needs, COMPILED))
    return Field(default, description=text, json_schema_extra=entry, **given)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a section of the file; None for a plain value."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def entries_of(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo, Entry]]:
    """Yield the keys of a section and of the sections in it: the path, the field and the entry of each."""
    for name, field in section.model_fields.items():
        if isinstance(field.json_schema_extra, Entry):
            yield f"{path}{name}", field, field.json_schema_extra
        inner = section_of(field)
        if inner is not None:
            yield from entries_of(inner, f"{path}{name}.")


def spellings_of(path: str, field: FieldInfo) -> list[str]:
    """Return the names or paths that a key may have in the file, the documented one first."""
    section, dot, name = path.rpartition(".")
    alias = field.validation_alias
    return [f"{section}{dot}{choice}" for choice in (alias.choices if isinstance(alias, AliasChoices) else [name])]


def value_at(config: BaseModel, path: str) -> Any:
    """Return the value of a key; None in a section that is not set."""
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def is_set(config: BaseModel, path: str, field: FieldInfo) -> bool:
    """Return True if a key differs from its default."""
    section = value_at(config, path.rpartition(".")[0]) if "." in path else config
    return section is not None and value_at(config, path) != field.get_default(call_default_factory=True)

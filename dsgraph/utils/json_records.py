"""Records as JSON and back: plain dataclasses, read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """The first entries of every file, whatever its version."""

    format: str
    version: int


class RecordError(ValueError):
    """A JSON text that is not the expected record.

    Fix: create the file that the message names again, with this version of dsgraph.
    """


RecordT = TypeVar("RecordT")


def to_json(record: Any) -> Any:
    """Return a record, or a tuple of records, as JSON values. Fields equal to their defaults are left out."""
    return _adapter(Any).dump_python(record, mode="json", exclude_defaults=True)


def to_json_text(record: Any) -> str:
    """Return a record as JSON text on one line."""
    return _adapter(type(record)).dump_json(record, exclude_defaults=True).decode()


def from_json_text(kind: type[RecordT], text: str | bytes) -> RecordT:
    """Return the record in a JSON text. Keys that this version does not know are skipped.

    Raises:
        RecordError: It is no JSON, or a value is missing or of another type; the message names it.
    """
    try:
        found: RecordT = _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(f"{where + ': ' if where else ''}{first['msg']}") from None
    return found


def json_schema(kind: type) -> dict[str, Any]:
    """Return the JSON schema of a kind of record."""
    return _adapter(kind).json_schema()


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return _make_adapter(kind)


@cache
def _make_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

"""Layout of the text of a report: tables, lines of at most 100 columns, short names of places."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

WIDTH = 100


def table(rows: Iterable[tuple[object, ...]], headers: Sequence[str]) -> str:
    """Return rows under their headers."""
    return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)


def short(place: str) -> str:
    """Return a place with one folder: `/home/me/project/model.py:12 (f)` -> `project/model.py:12 (f)`."""
    head, separator, tail = place.partition(":")
    return str(Path(*Path(head).parts[-2:])) + separator + tail


def fit(text: str, width: int) -> str:
    """Return the text, shortened at its front except for "forward of" and "backward of"."""
    head = next((head for head in ("forward of ", "backward of ") if text.startswith(head)), "")
    rest, room = text.removeprefix(head), width - len(head)
    return text if len(text) <= width else f"{head}...{rest[len(rest) - room + 3 :]}"


def wrap(*lines: str) -> str:
    """Return lines of at most `WIDTH` columns."""
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)

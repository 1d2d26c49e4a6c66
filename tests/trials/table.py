"""The table of tests/trials/README.md: `python -m tests.trials.table tests/trials/README.md` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tests.trials.trial import Trial


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def table_of(trials: Iterable[Trial]) -> str:
    """One row a trial, by file."""
    lines = ["| what a user does | in | outcome | before |", "|---|---|---|---|"]
    lines += [f"| {each.title} | `{each.room}` | {each.outcome} | {each.was} |" for each in trials]
    return "\n".join(lines)


def write_table(page: Path, table: str, *, name: str = "trials") -> None:
    """Insert a table between its marks.

    Raises:
        ValueError: The page has no marks.
    """
    first, last = _marks(name)
    before, found, rest = page.read_text().partition(first)
    _, closing, after = rest.partition(last)
    if not found or not closing:
        raise ValueError(f"{page} has no {first} ... {last}")
    page.write_text(f"{before}{first}\n{table}\n{last}{after}")


if __name__ == "__main__":
    from tests.trials.rooms import TRIALS

    write_table(Path(sys.argv[1]), table_of(TRIALS.values()))

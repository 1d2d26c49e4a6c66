"""The table of docs/trials.md: `python -m tests.trials.table docs/trials.md` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tests.trials.trial import Trial

MARK = ("<!-- trials -->", "<!-- /trials -->")


def table_of(trials: Iterable[Trial]) -> str:
    """One row a trial, by file."""
    lines = ["| what a user does | in | outcome | before |", "|---|---|---|---|"]
    lines += [f"| {each.title} | `{each.room}` | {each.outcome} | {each.was} |" for each in trials]
    return "\n".join(lines)


def write_table(page: Path, trials: Iterable[Trial]) -> None:
    """Puts the table between its marks.

    Raises:
        ValueError: The page has no marks.
    """
    before, found, rest = page.read_text().partition(MARK[0])
    _, closing, after = rest.partition(MARK[1])
    if not found or not closing:
        raise ValueError(f"{page} has no {MARK[0]} ... {MARK[1]}")
    page.write_text(f"{before}{MARK[0]}\n{table_of(trials)}\n{MARK[1]}{after}")


if __name__ == "__main__":
    from tests.trials.rooms import TRIALS

    write_table(Path(sys.argv[1]), TRIALS.values())

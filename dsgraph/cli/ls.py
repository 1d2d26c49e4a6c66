"""`dsgraph ls`."""

from __future__ import annotations

from pathlib import Path

from .command import Answer


def list_dump(folder: Path) -> Answer:
    """What a dump holds: its graphs, rank by rank."""
    names = sorted(str(path.relative_to(folder)) for path in folder.glob("rank*/compile*/*.py"))
    return Answer("\n".join(names), names)

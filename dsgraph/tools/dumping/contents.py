"""The files of a dump: how they are written and recognized. No other file is ever deleted, no link is followed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_RANK, _COMPILE = re.compile(r"rank(\d+)"), re.compile(r"compile(\d+)")
_FILE = re.compile(r"(compile\.json|(capture|joint|forward|backward)-\d+-[^/]*\.(py|json))(\.\d+\.tmp)?")


def rank_folders(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the ranks of a dump, each with its folder."""
    yield from _folders(folder, _RANK)


def compile_folders(place: Path) -> Iterator[tuple[int, Path]]:
    """Yield the compiles of a rank's folder, each with its own."""
    yield from _folders(place, _COMPILE)


def is_part(path: Path) -> bool:
    """Return whether a path in a compile's folder is a file that a dump writes."""
    return path.is_file() and not path.is_symlink() and _FILE.fullmatch(path.name) is not None


def remove_compiles(place: Path) -> None:
    """Remove what was dumped into a rank's folder, and the folders that are empty then.

    Raises:
        OSError: The file system refuses.
    """
    for _, compiled in list(compile_folders(place)):
        for path in list(compiled.iterdir()):
            if is_part(path):
                path.unlink()
        _remove_if_empty(compiled)
    _remove_if_empty(place)


def stranger(folder: Path) -> Path | None:
    """Return a file in a folder that is no part of a dump, relative to the folder; None if all files are."""
    ranks = {path for _, path in rank_folders(folder)}
    for rank in sorted(folder.iterdir()):
        if rank not in ranks:
            return rank.relative_to(folder)
        compiles = {path for _, path in compile_folders(rank)}
        for compiled in sorted(rank.iterdir()):
            if compiled not in compiles:
                return compiled.relative_to(folder)
            for path in sorted(compiled.iterdir()):
                if not is_part(path):
                    return path.relative_to(folder)
    return None


def _folders(folder: Path, name: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = name.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            yield int(match[1]), path


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()

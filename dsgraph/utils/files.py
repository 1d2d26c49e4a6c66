"""Files that a reader sees complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it, or nothing.

    Raises:
        OSError: The file system refuses; no partial file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def absolute(path: str) -> str:
    """Return a path that stays the same when the working directory changes; `~` is the user's folder."""
    return str(Path(path).expanduser().absolute())

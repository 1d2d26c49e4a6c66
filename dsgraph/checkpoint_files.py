"""The files of a checkpoint: `engine.json` says of each its checksum, and a rename makes all of them there at once."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dsgraph.errors import CheckpointError
from dsgraph.files import write_whole

FORMAT = "dsgraph-engine-1"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_BLOCK = 2**22
_READERS = 4  # threads: reading and summing up hold no lock


def check_tag(tag: str) -> str:
    """The tag, if it can name a folder.

    Raises:
        CheckpointError: It cannot.
    """
    if not _TAG.fullmatch(tag):
        raise CheckpointError(f"tag {tag!r}: it takes letters, digits, '_', '-' and '.'")
    return tag


def latest_tag(folder: Path) -> str | None:
    """The tag of the newest checkpoint in a folder; None where there is none."""
    latest = folder / "latest"
    return latest.read_text().strip() if latest.is_file() else None


def make_unfinished(folder: Path, tag: str) -> Path:
    """An empty folder for the files of a checkpoint that is being written."""
    unfinished = unfinished_folder(folder, tag)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def unfinished_folder(folder: Path, tag: str) -> Path:
    """Where the files of a checkpoint are until it is complete."""
    return folder / f".{tag}.unfinished"


def complete(folder: Path, tag: str, about: Mapping[str, Any]) -> Path:
    """Makes a checkpoint of what stands in its unfinished folder, and the latest one.

    Args:
        folder: Folder of checkpoints.
        tag: Name of this one; one of the same name is replaced.
        about: What `engine.json` says besides the checksums.

    Returns:
        Its folder.
    """
    unfinished, final = unfinished_folder(folder, tag), folder / tag
    paths = sorted(unfinished.iterdir())
    with ThreadPoolExecutor(_READERS) as pool:
        files = {path.name: total for path, total in zip(paths, pool.map(_checksum, paths), strict=True)}
    write_whole(unfinished / "engine.json", json.dumps({**about, "files": files}, indent=1).encode())
    if final.exists():  # the new one is complete by now
        replaced = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        unfinished.rename(final)
        shutil.rmtree(replaced)
    else:
        unfinished.rename(final)
    write_whole(folder / "latest", f"{tag}\n".encode())
    return final


def read_about(path: Path, *, share: int = 0, shares: int = 1) -> dict[str, Any]:
    """What `engine.json` says, when a share of the files is as it was written.

    Args:
        path: The checkpoint.
        share: Which of the shares is checked.
        shares: How many there are: one a rank.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    try:
        about: dict[str, Any] = json.loads((path / "engine.json").read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(item.parent.name for item in path.parent.glob("*/engine.json")))
        raise CheckpointError(f"there is no checkpoint {path.name!r}; known: {known or 'none'}") from None
    except ValueError:
        raise CheckpointError("engine.json is damaged") from None
    for number, (name, checksum) in enumerate(about["files"].items()):
        if number % shares != share:
            continue
        if not (path / name).is_file() or _checksum(path / name) != checksum:
            raise CheckpointError(f"file {name} is damaged or missing: load another checkpoint by its tag")
    return about


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total

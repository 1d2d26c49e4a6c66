"""A folder of checkpoints: finding the one to read, and writing another next to it.

    checkpoints/latest                       the newest tag
    checkpoints/<tag>/                       a checkpoint
    checkpoints/.<tag>.<number>.unfinished   being written; locked while its writer runs
    checkpoints/.<tag>.replaced              the old checkpoint of that tag, while the new one replaces it

A killed process leaves one of the last two. The next writer removes the first. The next writer or reader renames
the second back if there is no new checkpoint of that tag.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgraph.utils.errors import CheckpointError

from .checkpoint_files import ABOUT, LATEST, check_tag, known_tags, latest_line, latest_tag, write_about

_NEXT_LATEST = ".latest.next"
_UNFINISHED = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{8}\.unfinished", re.DOTALL)
_REPLACED = re.compile(r"\.(?P<tag>.+)\.replaced", re.DOTALL)


def find_tag(folder: Path, tag: object = None) -> str | None:
    """Return the tag of the checkpoint to read.

    Args:
        folder: Folder of checkpoints.
        tag: Tag of a checkpoint; None: the newest.

    Returns:
        The tag; None if there is no checkpoint and no tag was given.

    Raises:
        CheckpointError: The tag cannot be the name of a folder; or the file `latest` is damaged; or it is missing and
            there are several checkpoints.
    """
    with suppress(OSError):  # a read-only folder has no interrupted replacement
        _put_back_killed(folder)
    if tag is not None:
        return check_tag(tag)
    newest = latest_tag(folder)
    if newest is not None:
        return newest
    known = known_tags(folder)
    if len(known) > 1:
        raise CheckpointError(
            f"the file {LATEST!r} is missing, and there are several checkpoints: load one by its tag; known: "
            f"{', '.join(known)}"
        )
    return known[0] if known else None  # its writer was killed before it wrote the file


@dataclass(eq=False)
class Unfinished:
    """A checkpoint that is being written.

    Attributes:
        folder: Folder of checkpoints.
        tag: Tag of this checkpoint.
        path: Folder of its files until it is complete; no other writer uses it.
    """

    folder: Path
    tag: str
    path: Path
    _lock: int | None = None

    @classmethod
    def begin(cls, folder: Path, tag: str) -> Unfinished:
        """Create the folder to write into, and remove leftovers of killed writers.

        Raises:
            CheckpointError: Another job or engine is writing the same checkpoint, or the tag is the name of something
                else.
            OSError: The file system refuses.
        """
        check_tag(tag)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _refuse_other(folder / tag)
            _put_back(folder)
            for path in folder.iterdir():
                found = _UNFINISHED.fullmatch(path.name)
                if found is not None and not _remove_left(path) and found["tag"] == tag:
                    raise CheckpointError(
                        f"{folder / tag} is being written by another job or engine: wait for it, or choose another tag "
                        "or folder"
                    )
            path = folder / f".{tag}.{secrets.token_hex(4)}.unfinished"
            path.mkdir()
            return cls(folder, tag, path, _try_lock(path))

    def complete(self, about: Mapping[str, Any]) -> Path:
        """Turn the written files into the latest checkpoint. A checkpoint of the same name is replaced.

        Args:
            about: Content of `engine.json` without the checksums, from `encode_about`.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: The tag is the name of something else.
            OSError: The file system refuses; the previous checkpoint stays the latest.
        """
        write_about(self.path, {**about, "tag": self.tag})
        final = self.folder / self.tag
        with _locked(self.folder):
            _refuse_other(final)
            upcoming = self.folder / _NEXT_LATEST  # written first: after the renames no disk space is needed
            upcoming.write_bytes(latest_line(self.tag))
            replaced = self.folder / f".{self.tag}.replaced"
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            self.path.rename(final)
            upcoming.replace(self.folder / LATEST)
            shutil.rmtree(replaced, ignore_errors=True)
        self._let_go()
        return final

    def give_up(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError), _locked(self.folder):
            (self.folder / _NEXT_LATEST).unlink(missing_ok=True)
            _put_back(self.folder)
        self._let_go()

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        _unlock(lock)


def _put_back_killed(folder: Path) -> None:
    """Restore the names of checkpoints whose writer was killed while it replaced them."""
    if folder.is_dir() and any(_REPLACED.fullmatch(path.name) for path in folder.iterdir()):
        with _locked(folder):
            _put_back(folder)


def _put_back(folder: Path) -> None:
    for path in list(folder.iterdir()):
        found = _REPLACED.fullmatch(path.name)
        if found is not None and (folder / found["tag"]).exists():
            shutil.rmtree(path, ignore_errors=True)
        elif found is not None:
            path.rename(folder / found["tag"])


def _refuse_other(final: Path) -> None:
    """Raise an error if something other than a checkpoint would be replaced."""
    is_there = final.is_symlink() or final.exists()
    if is_there and not (final.is_dir() and ((final / ABOUT).is_file() or not any(final.iterdir()))):
        raise CheckpointError(f"{final} exists and is not a checkpoint, so it is not replaced: choose another tag")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other writers while names change."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: two jobs are not detected
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        _unlock(descriptor)


def _try_lock(path: Path) -> int | None:
    """Return a lock that the kernel releases when this process ends; None if another process holds it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks
        pass
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked since has the file open as well
        os.close(descriptor)


def _remove_left(path: Path) -> bool:
    """Remove the files of a writer that has ended; return False if it is still running."""
    lock = _try_lock(path)
    if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        _unlock(lock)
    return lock is not None

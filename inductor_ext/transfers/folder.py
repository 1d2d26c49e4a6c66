"""A private temporary folder that does not outlive its process for long, however the process ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import TransferError

_LOCK = "in-use"


class PrivateFolder:
    """A folder of this process below `root`, which only this user can read.

    The process holds a lock on a file in it, which the kernel releases however the process ends. The next process that
    makes a folder removes unlocked ones. `remove` is for a process that ends normally.

    Attributes:
        path: The folder.
    """

    def __init__(self, root: Path) -> None:
        """Create the folder, and remove those of killed processes.

        Args:
            root: The folder of all these folders; it is created if it does not exist.

        Raises:
            TransferError: Another user could read or change it.
        """
        _make_private(root)
        with _locked(root / "lock"):
            for left in sorted(root.glob("process-*")):
                _remove_unless_held(left)
            self.path = Path(tempfile.mkdtemp(prefix=f"process-{os.getpid()}-", dir=root))
            self._held = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._held, fcntl.LOCK_EX)
        self._owner = os.getpid()

    def remove(self) -> None:
        """Remove the folder and its content, once. A forked process does not remove its parent's folder."""
        if os.getpid() == self._owner and self._held >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held)
            self._held = -1


def usual_root() -> Path:
    """Return the default root: in the folder for temporary files, which the variable TMPDIR names."""
    return folder_below(Path(tempfile.gettempdir()))


def folder_below(place: Path) -> Path:
    """Return the root in a place other than the folder for temporary files."""
    return place / f"dsgraph-offload-{os.getuid()}"


def _make_private(root: Path) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise TransferError(
            f"{root} is to hold offloaded tensors, but it is not a folder of this user alone (chmod 700): remove it, "
            "or name another folder (TMPDIR for activations, nvme_path for optimizer state)"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_unless_held(folder: Path) -> None:
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # its process was killed before it made one: it held the lock of all folders
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)

"""Reading and writing of complete buffers, without the page cache if the file system allows it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .buffer_pool import Buffer
from .errors import TransferError


def write_file(path: Path, buffer: Buffer) -> None:
    """Write a complete buffer to a new file. Other threads run during the call.

    Raises:
        TransferError: The disk is full, or the file cannot be written. No file is left then.
    """
    try:
        transfer_part(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, buffer, os.pwritev)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise TransferError(_describe("write", path, buffer, error)) from error


def read_file(path: Path, buffer: Buffer) -> None:
    """Fill a buffer from a file of its size. Other threads run during the call.

    Raises:
        TransferError: The file cannot be read, or it is too short.
    """
    try:
        transfer_part(path, os.O_RDONLY, buffer, os.preadv)
    except OSError as error:
        raise TransferError(_describe("read", path, buffer, error)) from error


def transfer_part(path: Path, flags: int, buffer: Buffer, transfer: object, *, at: int = 0) -> None:
    """Read or write a buffer's size of bytes of a file, directly if the file system allows it.

    Args:
        path: The file.
        flags: Flags to open it with.
        buffer: The buffer.
        transfer: `os.preadv` or `os.pwritev`.
        at: Offset in the file, whole pages.

    Raises:
        OSError: Not all of it could be transferred.
    """
    try:
        _transfer(path, flags | getattr(os, "O_DIRECT", 0), buffer, transfer, at)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        _transfer(path, flags, buffer, transfer, at)  # the file system has no direct access


def _transfer(path: Path, flags: int, buffer: Buffer, transfer: object, at: int) -> None:
    assert callable(transfer)
    memory, done = buffer.view(), 0
    handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        while done < buffer.size:
            count = transfer(handle, [memory[done:]], at + done)
            if count == 0:
                raise OSError(errno.EIO, f"it ends after {at + done} bytes")
            done += count
    finally:
        os.close(handle)


def _describe(verb: str, path: Path, buffer: Buffer, error: OSError) -> str:
    what = f"cannot {verb} {buffer.size} bytes of an offloaded activation: {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{what}; free space there, name a folder on a larger disk in TMPDIR, or offload to the host "
            "(activation_offload='host')"
        )
    return f"{what}; see whether the disk is in order, or name another folder in TMPDIR"

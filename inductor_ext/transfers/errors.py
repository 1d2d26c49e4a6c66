"""Errors of transfers."""

from __future__ import annotations


class TransferError(RuntimeError):
    """A tensor that could not be stored or read back. Nothing was computed from it.

    Fix: free space in the folder that the message names, or set TMPDIR to another disk; then load the last checkpoint.
    """

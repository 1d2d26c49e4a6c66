"""What a transfer says when it cannot be done."""

from __future__ import annotations


class TransferError(RuntimeError):
    """A tensor could not be stored or read back. No number was computed from it."""

"""The known name that is nearest to an unknown one. Without torch, for the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(found: str, known: Iterable[str]) -> str:
    """A question with the known name that is nearest, to end an error message; empty when none is near."""
    close = difflib.get_close_matches(found, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""

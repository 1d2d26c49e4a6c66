"""What ranks do at the same time, so that where one fails all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsgraph.errors import CheckpointError

from .agreement import Agreement


def all_or_none(agreement: Agreement, doing: str, act: Callable[[], Any]) -> None:
    """Run `act` on each rank of an agreement. All of them call it.

    Raises:
        CheckpointError: It failed on one rank; all ranks raise what it said.
    """
    mine = ""
    try:
        act()
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        mine = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    for rank, text in agreement.exchange(f"how they {doing}", mine).items():
        if text:
            raise CheckpointError(f"{doing}: rank {rank}: {text}")

"""Functions that run on several ranks, where all ranks raise an error if one fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dsgraph.utils.errors import CheckpointError

from .agreement import Agreement


def all_or_none(agreement: Agreement, doing: str, act: Callable[[], Any]) -> None:
    """Run `act` on each rank of an agreement. All of them call it.

    Raises:
        CheckpointError: `act` failed on one rank; all ranks raise its error.
    """
    mine = ""
    try:
        act()
    except Exception as error:  # of any type: the other ranks wait for the result
        mine = reason(error)
    for rank, text in agreement.exchange(f"how they {doing}", mine).items():
        if text:
            raise CheckpointError(f"{doing}: rank {rank}: {text}")


def on_first(agreement: Agreement, doing: str, act: Callable[[], str | None]) -> str | None:
    """Run `act` only on the first rank of an agreement. All of them call it.

    Returns:
        The result of `act`, on all ranks.

    Raises:
        CheckpointError: `act` failed; all ranks raise its error.
    """
    mine: dict[str, str | None] = {}
    if dist.get_rank() == agreement.ranks[0]:
        try:
            mine["found"] = act()
        except Exception as error:  # of any type: the other ranks wait for the result
            mine["failed"] = reason(error)
    said = agreement.exchange(f"how the first of them did: {doing}", json.dumps(mine))
    first: dict[str, str | None] = json.loads(said[agreement.ranks[0]])
    if "failed" in first:
        raise CheckpointError(f"{doing}: {first['failed']}")
    return first["found"]


def reason(error: BaseException) -> str:
    """Return the reason of a failure in one line; for disk errors the message of the operating system."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, dcp.api.CheckpointException):
        return "; ".join(f"rank {rank}: {reason(failure)}" for rank, (failure, _) in error.failures.items())
    deepest: BaseException | None = error
    while deepest is not None and not isinstance(deepest, OSError):
        deepest = deepest.__cause__ or deepest.__context__
    return " ".join(str(deepest or error).split())[:500] or type(error).__name__

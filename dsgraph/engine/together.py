"""What ranks do at the same time, so that where one fails all raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dsgraph.errors import CheckpointError
from dsgraph.sharding.agreement import Agreement
from dsgraph.sharding.table import partitioned_parts


def together(module: nn.Module, doing: str, act: Callable[[], Any]) -> None:
    """Runs `act` on each rank of a partitioned model.

    Raises:
        CheckpointError: One failed; all ranks raise what it said.
    """
    mine = ""
    try:
        act()
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        mine = reason(error)
    for rank, text in exchange(module, f"how they {doing}", mine).items():
        if text:
            raise CheckpointError(f"{doing}: rank {rank}: {text}")


def on_first(module: nn.Module, doing: str, act: Callable[[], str | None]) -> str | None:
    """Runs `act` on the first rank of a partitioned model alone.

    Returns:
        What it returned there, on all ranks.

    Raises:
        CheckpointError: It failed; all ranks raise what it said.
    """
    mine: dict[str, str | None] = {}
    if dist.get_rank() == ranks_of(module)[0]:
        try:
            mine["found"] = act()
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            mine["failed"] = reason(error)
    said = exchange(module, f"how the first of them did: {doing}", json.dumps(mine))
    first: dict[str, str | None] = json.loads(said[ranks_of(module)[0]])
    if "failed" in first:
        raise CheckpointError(f"{doing}: {first['failed']}")
    return first["found"]


def exchange(module: nn.Module, what: str, text: str) -> dict[int, str]:
    """The text of every rank of a partitioned model, by rank. All ranks call it."""
    return _agreement(module).exchange(what, text)


def ranks_of(module: nn.Module) -> tuple[int, ...]:
    """The ranks of a partitioned model."""
    return _agreement(module).ranks


def _agreement(module: nn.Module) -> Agreement:
    (part,) = partitioned_parts(module)
    return Agreement.over(part.mesh)


def reason(error: BaseException) -> str:
    """Why something failed, in a line: what the disk said, where it was the disk."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, dcp.api.CheckpointException):
        return "; ".join(f"rank {rank}: {reason(failure)}" for rank, (failure, _) in error.failures.items())
    deepest: BaseException | None = error
    while deepest is not None and not isinstance(deepest, OSError):
        deepest = deepest.__cause__ or deepest.__context__
    return " ".join(str(deepest or error).split())[:500] or type(error).__name__

"""What ranks do at the same time, so that where one fails all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    (part,) = partitioned_parts(module)
    for rank, text in Agreement.over(part.mesh).exchange(f"how they {doing}", mine).items():
        if text:
            raise CheckpointError(f"{doing}: rank {rank}: {text}")


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

"""Runs functions on all ranks of an engine, so that all ranks raise if one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dsgraph.partitioning.state import partition_states
from dsgraph.ranks import joint_failure
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.joint_failure import reason


def together(module: nn.Module, doing: str, act: Callable[[], Any]) -> None:
    """Run `act` on each rank of a partitioned model; see `all_or_none`."""
    joint_failure.all_or_none(_agreement(module), doing, act)


def on_first(module: nn.Module, doing: str, act: Callable[[], str | None]) -> str | None:
    """Run `act` only on the first rank of a partitioned model; see `joint_failure.on_first`."""
    return joint_failure.on_first(_agreement(module), doing, act)


def exchange(module: nn.Module, what: str, text: str) -> dict[int, str]:
    """Return the text of every rank of a partitioned model, by rank. All ranks call it."""
    return _agreement(module).exchange(what, text)


def ranks_of(module: nn.Module) -> tuple[int, ...]:
    """Return the ranks of a partitioned model."""
    return _agreement(module).ranks


def _agreement(module: nn.Module) -> Agreement:
    (part,) = partition_states(module)
    return Agreement.over(part.mesh)


__all__ = ["exchange", "on_first", "ranks_of", "reason", "together"]

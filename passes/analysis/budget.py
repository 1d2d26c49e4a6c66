"""The memory of a step: what it needs, part by part, and what passes have taken of the rest.

It stands beside the analyses, below the passes, because both the facts that passes get and the compiler that makes them
hold one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TypeVar

from dsgraph.passes.ir.parameters import ParameterSpec

from .knapsack import most_valuable
from .pieces import GraphMemory
from .states import held_bytes, shard_bytes, state_bytes

Entry = TypeVar("Entry")


class MemoryPart(Enum):
    """What the memory of a step is for."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENTS = "gradients"
    GATHERED_COPIES = "gathered copies"
    """Parameters of full size that outlive their use: kept for the backward, or held for a step."""
    ACTIVATIONS = "activations"
    """What the forward saves and the backward computes with."""
    COMMUNICATION = "communication"
    """What collectives under way read and write."""


@dataclass
class MemoryBudget:
    """How much of a device's memory a step may use, and for what. Bytes.

    What passes take is written down with its taker, so that it is not there for the next, and taking it again changes
    nothing. What a graph shows by itself, such as gathers under way, is not written down: `left_beside` counts it by
    the graph's own memory.

    Attributes:
        limit: What a step may use; None when nothing is known of it.
        needs: What a step needs, whatever passes do.
        to_keep: How much may be gathered copies that passes keep, the same on every rank; None when nothing is known.
    """

    limit: int | None = None
    needs: Mapping[MemoryPart, int] = field(default_factory=lambda: MappingProxyType({}))
    to_keep: int | None = None
    _taken: dict[MemoryPart, dict[str, int]] = field(default_factory=dict)

    @property
    def left(self) -> int | None:
        """What the limit leaves besides all that is needed and taken, 0 or more; None without a limit."""
        if self.limit is None:
            return None
        return max(0, self.limit - sum(self.needs.values()) - sum(map(self.taken, MemoryPart)))

    @property
    def left_to_keep(self) -> int | None:
        """What of `to_keep` nobody has taken, 0 or more; None when nothing is known of it."""
        return None if self.to_keep is None else max(0, self.to_keep - self.taken(MemoryPart.GATHERED_COPIES))

    def taken(self, part: MemoryPart) -> int:
        """What passes have taken for one part."""
        return sum(self._taken.get(part, {}).values())

    def take(self, part: MemoryPart, taker: str, size: int) -> None:
        """Writes down that a value takes room."""
        self._taken.setdefault(part, {})[taker] = size

    def left_beside(self, memory: GraphMemory, params: Collection[ParameterSpec]) -> int:
        """What the limit leaves beside a graph as it is: parameters and optimizer state lie in memory all the time.

        Args:
            memory: Of the graph, in which what was kept for it is alive already.
            params: The parameters that come into the graph, which its own memory counts.
        """
        assert self.limit is not None, "without a limit nothing is short"
        held = sum(self.needs.get(part, 0) for part in (MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER_STATE))
        here = sum(map(shard_bytes, params))
        elsewhere = here - sum(map(held_bytes, params))
        return max(0, self.limit - (memory.peak - elsewhere) - max(0, held - (here - elsewhere)))


def parameter_needs(params: Iterable[ParameterSpec]) -> dict[MemoryPart, int]:
    """What a step needs for parameters: shards, and for those that are trained gradients and an optimizer's state.

    What lies elsewhere is not counted, nor are the buffers through which it passes.
    """
    known = list(params)
    return {
        MemoryPart.PARAMETERS: sum(map(held_bytes, known)),
        MemoryPart.GRADIENTS: sum(held_bytes(info) for info in known if info.requires_grad),
        MemoryPart.OPTIMIZER_STATE: sum(map(state_bytes, known)),
    }


def choose(entries: Sequence[Entry], sizes: Sequence[int], seconds: Sequence[float], room: int) -> list[Entry]:
    """The entries that fit into `room` together and spare most seconds, in order.

    Args:
        entries: What asks for room.
        sizes: How much each takes, bytes.
        seconds: How much time each spares. Equal on every rank where the choice has to be.
        room: Bytes.
    """
    return [entries[number] for number in most_valuable(sizes, seconds, room=room)]

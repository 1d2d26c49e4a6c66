"""The memory budget of a step: its needs by part, and the reservations of passes in the rest.

It is in this package, below the passes, because both the facts for passes and the compiler use it.
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
    """The purpose of a part of a step's memory."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENTS = "gradients"
    GATHERED_COPIES = "gathered copies"
    """Parameters of full size that outlive their use: kept for the backward, or held for a step."""
    ACTIVATIONS = "activations"
    """Values that the forward saves and the backward uses."""
    COMMUNICATION = "communication"
    """Inputs and outputs of running collectives."""


@dataclass(frozen=True)
class StageNeeds:
    """The memory of a training step besides one run of a graph that several runs share: a pipeline stage, or a block.

    Attributes:
        held: Purpose -> bytes of tensors that the rank has in memory and the graph does not read.
        in_flight: The most runs whose forward is over and whose backward is not: micro-batches of a stage, or blocks.
        is_block: True for a block.
        group: Process group of the ranks that run equal graphs, with collectives, and need the same plan; "" for none.
        gradients: Bytes of gradients that exist as well when no other run waits for its backward.
        between: Bytes in place of the run that the code between blocks takes while the values of all blocks are saved.
        before: The same before the first block, when none are saved.
    """

    held: Mapping[str, int]
    in_flight: int = 1
    group: str = ""
    is_block: bool = False
    gradients: int = 0
    between: int = 0
    before: int = 0


@dataclass
class MemoryBudget:
    """The device memory that a step may use, by purpose. Bytes.

    Reservations are stored by owner, so that later passes see them, and repeating one changes nothing. Memory that the
    graph itself shows, such as running gathers, is not reserved: `left_beside` counts it by the graph's memory.

    Attributes:
        limit: The bytes that a step may use; None if unknown.
        needs: The bytes that a step needs, whatever passes do.
        to_keep: The bytes of gathered copies that passes may keep, the same on every rank; None if unknown.
    """

    limit: int | None = None
    needs: Mapping[MemoryPart, int] = field(default_factory=lambda: MappingProxyType({}))
    to_keep: int | None = None
    _taken: dict[MemoryPart, dict[str, int]] = field(default_factory=dict)

    @property
    def left(self) -> int | None:
        """The bytes that the limit leaves besides needs and reservations, 0 or more; None without a limit."""
        if self.limit is None:
            return None
        return max(0, self.limit - sum(self.needs.values()) - sum(map(self.taken, MemoryPart)))

    @property
    def left_to_keep(self) -> int | None:
        """The bytes of `to_keep` that are not reserved, 0 or more; None if unknown."""
        return None if self.to_keep is None else max(0, self.to_keep - self.taken(MemoryPart.GATHERED_COPIES))

    def taken(self, part: MemoryPart) -> int:
        """Return the bytes that passes have reserved for one part."""
        return sum(self._taken.get(part, {}).values())

    def take(self, part: MemoryPart, taker: str, size: int) -> None:
        """Reserve memory for a value."""
        self._taken.setdefault(part, {})[taker] = size

    def left_beside(self, memory: GraphMemory, params: Collection[ParameterSpec]) -> int:
        """Return the bytes that the limit leaves beside a graph; parameters and optimizer state are always in memory.

        Args:
            memory: The memory of the graph, in which kept values are alive already.
            params: The parameters that are inputs of the graph, which its own memory includes.
        """
        assert self.limit is not None, "without a limit nothing is short"
        held = sum(self.needs.get(part, 0) for part in (MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER_STATE))
        here = sum(map(shard_bytes, params))
        elsewhere = here - sum(map(held_bytes, params))
        return max(0, self.limit - (memory.peak - elsewhere) - max(0, held - (here - elsewhere)))


def parameter_needs(params: Iterable[ParameterSpec]) -> dict[MemoryPart, int]:
    """Return the bytes that a step needs for parameters: shards, and gradients and optimizer state of trained ones.

    Offloaded tensors are not counted, nor are the buffers of their transfers.
    """
    known = list(params)
    return {
        MemoryPart.PARAMETERS: sum(map(held_bytes, known)),
        MemoryPart.GRADIENTS: sum(held_bytes(info) for info in known if info.requires_grad),
        MemoryPart.OPTIMIZER_STATE: sum(map(state_bytes, known)),
    }


def choose(entries: Sequence[Entry], sizes: Sequence[int], seconds: Sequence[float], room: int) -> list[Entry]:
    """Return the entries that fit into `room` together and save the most seconds, in order.

    Args:
        entries: The candidates.
        sizes: Bytes of each.
        seconds: Time that each saves. Equal on all ranks if the choice must be.
        room: Bytes.
    """
    return [entries[number] for number in most_valuable(sizes, seconds, room=room)]

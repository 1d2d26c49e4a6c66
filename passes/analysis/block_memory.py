"""Full parameters and gradients of repeated blocks that exist around their graphs in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockMemory:
    """The memory that a plan needs for a block, besides the graphs. Bytes.

    Attributes:
        name: The block.
        copies: Its full parameters.
        full_gradients: Its gradients, until they are reduced.
        gradients: This rank's rows of its gradients.
    """

    name: str
    copies: int
    full_gradients: int
    gradients: int


@dataclass(frozen=True)
class AroundBlocks:
    """The memory of a step besides the graphs of its blocks. Bytes.

    Attributes:
        beside: The most while a block runs.
        between: The most while none runs and values of blocks are saved.
        before: The most before the first block runs, and after the last backward of a block.
        calls: Number of calls of blocks in a forward.
        in_flight: Block's name -> number of its calls that would save as much as all blocks of a step, if blocks save
            in proportion to what they compute.
    """

    beside: int
    between: int
    before: int
    calls: int
    in_flight: Mapping[str, int]

    def most(self, other: AroundBlocks) -> AroundBlocks:
        """Return the larger amount of each."""
        return AroundBlocks(
            beside=max(self.beside, other.beside),
            between=max(self.between, other.between),
            before=max(self.before, other.before),
            calls=max(self.calls, other.calls),
            in_flight={**self.in_flight, **other.in_flight},
        )


class PlanMemory:
    """The memory that a plan holds while each graph of a step runs.

    forward     the block's parameters, and those of the next block; the last block's stay for the backward
    backward    the block's parameters, those of the block before it, and the gradients of the block after it

    Args:
        blocks: For each graph of the step, in the order of the forward, its block; None outside blocks.
        gathers_ahead: False if nothing is gathered before its use, and gradients are waited for at once.
    """

    def __init__(self, blocks: Sequence[BlockMemory | None], *, gathers_ahead: bool = True) -> None:
        self._graphs = blocks
        self._order = list(dict.fromkeys(block for block in blocks if block is not None))
        self._ahead = gathers_ahead

    def forward(self, number: int) -> int:
        """Return the bytes while the forward of a graph runs."""
        at = self._last_begun(number)
        kept = at == len(self._order) - 1 and at >= 0
        own = self._copies(at) if self._graphs[number] is not None or kept else 0
        return own + (self._copies(at + 1) if self._ahead and at >= 0 else 0)

    def backward(self, number: int) -> int:
        """Return the bytes while the backward of a graph runs."""
        at = self._last_begun(number)
        if self._graphs[number] is None:
            is_last = at == len(self._order) - 1
            return (self._copies(at) if is_last or self._ahead else 0) + self._reduced(at + 1)
        return self._copies(at) + (self._copies(at - 1) if self._ahead else 0) + self._reduced(at + 1)

    def _last_begun(self, number: int) -> int:
        """Return the position of the block that is running, or of the last one before a graph; -1 for none."""
        begun = [block for block in self._graphs[: number + 1] if block is not None]
        return self._order.index(begun[-1]) if begun else -1

    def _copies(self, at: int) -> int:
        return self._order[at].copies if 0 <= at < len(self._order) else 0

    def _reduced(self, at: int) -> int:
        """Return the bytes of gradients that are under way."""
        return self._order[at].full_gradients if self._ahead and at < len(self._order) else 0

"""A repeated block of a partitioned model, and whether the graph that Dynamo captures may end at one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from dsgraph.compat.dynamo import may_end_frame
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.passes.analysis.block_memory import AroundBlocks, BlockMemory


@dataclass(eq=False)
class BlockLimit:
    """The knowledge about a step of blocks that a `memory_limit` needs.

    Attributes:
        value: The option `memory_limit` of the last forward.
        is_kept: True if blocks are planned so that a step keeps the limit. Captured code reads this boolean.
        around: The memory of a step besides the graphs of blocks, for the last batch; None if it is not known.
        counted: Kind of batch -> `around` for it.
        planned: The most of `around` for which a block was planned; None before that.
        spare: Bytes of the limit that a step leaves, the least of all ranks and kinds of blocks; None if unknown.
        staying: Bytes of the copies of blocks that stay in them.
    """

    value: object = None
    is_kept: bool = False
    around: AroundBlocks | None = None
    counted: dict[Hashable, AroundBlocks] = field(default_factory=dict)
    planned: AroundBlocks | None = None
    spare: int | None = None
    staying: int = 0

    @property
    def left(self) -> int:
        """Bytes of the limit that nothing takes."""
        return (self.spare or 0) - self.staying

    def begin(self, value: object) -> None:
        """Note another limit."""
        self.value, self.is_kept, self.planned, self.spare = value, False, None, None

    def note_planned(self, around: AroundBlocks) -> None:
        """Note that a block was planned."""
        self.planned = around if self.planned is None else self.planned.most(around)

    def excess(self, blocks: int) -> str:
        """Return why the last step took more than was planned for; empty if it did not.

        Args:
            blocks: Number of blocks that ran.
        """
        if self.around is None or self.planned is None:
            return ""
        if blocks > self.planned.calls:
            return f"{blocks} blocks ran, and the plan counts {self.planned.calls}: begin with a forward that runs all"
        more = self.planned.most(self.around)
        bytes_more = max(
            more.beside - self.planned.beside, more.between - self.planned.between, more.before - self.planned.before
        )
        if bytes_more <= self.left:
            return ""
        return (
            f"the code around the blocks takes {bytes_more:,} bytes more than was planned: begin with the largest batch"
        )


def may_end_graph(limit: BlockLimit) -> bool:
    """Return True if the graph that Dynamo captures may end at a block.

    Args:
        limit: The state of a `memory_limit` of the model.
    """
    if limit.is_kept or not torch.is_grad_enabled():
        return may_end_frame()
    return may_end_frame("memory_limit")


@dataclass(eq=False)
class Block:
    """A repeated block, whose graphs are units of a step.

    Attributes:
        name: The block's name in the model.
        entries: Its sharded parameters; a tied one belongs to its first block.
        replicated: Its replicated parameters.
    """

    name: str
    entries: list[ParameterState]
    replicated: list[ParameterState] = field(default_factory=list)

    def trained(self) -> list[ParameterState]:
        """Return the parameters that require a gradient."""
        return [entry for entry in (*self.entries, *self.replicated) if entry.param.requires_grad]

    def memory(self) -> BlockMemory:
        """Return the memory that the block needs besides its graphs."""
        trained = self.trained()
        return BlockMemory(
            name=self.name,
            copies=sum(entry.copy_bytes for entry in self.entries),
            full_gradients=sum(
                entry.spec.numel * entry.spec.dtypes(entry.param.dtype)[1].itemsize for entry in trained
            ),
            gradients=sum(entry.gradient_bytes for entry in trained),
        )

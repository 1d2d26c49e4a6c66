"""A repeated block of a partitioned model, and whether the graph that Dynamo captures may end at one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dsgraph.compat.dynamo import may_end_frame
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.passes.analysis.block_memory import BlockMemory

from .block_limit import BlockLimit


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

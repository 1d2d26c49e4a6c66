"""The state of a model whose blocks keep a `memory_limit`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from dsgraph.passes.analysis.block_memory import AroundBlocks


@dataclass(eq=False)
class BlockLimit:
    """The knowledge about a step of blocks that a `memory_limit` needs.

    Attributes:
        is_kept: True if blocks are planned so that a step keeps the limit. Captured code reads this boolean.
        around: The memory of a step besides the graphs of blocks, for the last batch; None if it is not known.
        counted: Kind of batch -> `around` for it.
        needs_one_graph: Why the limit needs one graph; empty if blocks can keep it.
        spare: Bytes of the limit that a step leaves, the same on all ranks.
    """

    is_kept: bool = False
    around: AroundBlocks | None = None
    counted: dict[Hashable, AroundBlocks] = field(default_factory=dict)
    needs_one_graph: str = ""
    spare: int = 0

    def refuse(self, reason: str) -> None:
        """Note that the limit needs one graph."""
        self.is_kept, self.around, self.needs_one_graph = False, None, reason

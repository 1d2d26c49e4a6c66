"""The state of a model whose blocks keep a `memory_limit`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from dsgraph.passes.analysis.block_memory import AroundBlocks


@dataclass(eq=False)
class BlockLimit:
    """The knowledge about a step of blocks that a `memory_limit` needs.

    Attributes:
        value: The option `memory_limit` of the last forward.
        is_settled: True after a forward under this limit has returned.
        is_kept: True if blocks are planned so that a step keeps the limit. Captured code reads this boolean.
        around: The memory of a step besides the graphs of blocks, for the last batch; None if it is not known.
        counted: Kind of batch -> `around` for it.
        needs_one_graph: Why the limit needs one graph; empty if blocks can keep it.
        planned: The most of `around` for which a block was planned; None before that.
        spare: Bytes of the limit that a step leaves, the least of all ranks and kinds of blocks; None if unknown.
        staying: Bytes of the copies of blocks that stay in them.
    """

    value: object = None
    is_settled: bool = False
    is_kept: bool = False
    around: AroundBlocks | None = None
    counted: dict[Hashable, AroundBlocks] = field(default_factory=dict)
    needs_one_graph: str = ""
    planned: AroundBlocks | None = None
    spare: int | None = None
    staying: int = 0

    @property
    def left(self) -> int:
        """Bytes of the limit that nothing takes."""
        return (self.spare or 0) - self.staying

    def begin(self, value: object) -> bool:
        """Note the limit of a forward; return True until one under this limit has returned."""
        if value != self.value:
            self.value, self.is_settled, self.is_kept, self.needs_one_graph = value, False, False, ""
            self.planned = self.spare = None
        return not self.is_settled

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

    def refuse(self, reason: str) -> None:
        """Note that the limit needs one graph."""
        self.is_kept, self.around, self.spare, self.needs_one_graph = False, None, None, reason

"""Calls of blocks in a forward, and what their graphs read."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .block_copies import BlockCopies


@dataclass(eq=False)
class Call:
    """A call of a block in a forward.

    Attributes:
        graphs: Number of its graphs whose backward is still to come.
        has_read: True if a graph has read the block's copies.
    """

    graphs: int = 0
    has_read: bool = False


@dataclass(frozen=True)
class Reads:
    """The copies that a graph reads.

    Attributes:
        calls: The blocks, each with its call.
        copies: Those that its backward reads as well and that have no other readers, such as hooks of autograd.
    """

    calls: dict[BlockCopies, Call]
    copies: tuple[Tensor, ...] = field(repr=False)

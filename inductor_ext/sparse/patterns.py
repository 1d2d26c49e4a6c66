"""The named layouts, with the fields and defaults of DeepSpeed's configuration.

Fixed: Child et al., arXiv 1904.10509. BigBird: Zaheer et al., arXiv 2007.14062. BSLongformer: Beltagy et al., arXiv
2004.05150, in blocks. Blocks are numbered from 0; in "unidirectional" layouts a query sees no later key, also within a
block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .layouts import Layout, as_tuple


@dataclass(frozen=True, kw_only=True)
class Dense(Layout):
    """All blocks, for comparison."""

    mode: ClassVar[str] = "dense"

    def blocks(self, head: int, count: int) -> Tensor:
        """Return the blocks, see `Layout.blocks`."""
        return torch.ones(count, count, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class Fixed(Layout):
    """Windows of blocks that see themselves, and global blocks in each window that all queries see.

    Attributes:
        num_local_blocks: Number of blocks of a window.
        num_global_blocks: Number of last blocks of each window that every query sees.
        attention: "bidirectional" or "unidirectional".
        horizontal_global_attention: True if queries of those blocks see every key as well.
        num_different_global_patterns: Number of positions in a window between which heads alternate, with
            `different_layout_per_head`.
    """

    mode: ClassVar[str] = "fixed"

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._want_attention()
        local, given = self.num_local_blocks, self.num_global_blocks
        self.want("num_local_blocks", local >= 1, "1 or more")
        self.want("num_global_blocks", 0 <= given <= local, f"0 to num_local_blocks, {local}")
        one_way = self.attention == "unidirectional"
        self.want("horizontal_global_attention", not (self.horizontal_global_attention and one_way), _ONE_WAY)
        most = local // given if given and self.different_layout_per_head else 1
        takes = f"1 to {most} here (num_local_blocks / num_global_blocks, and 1 unless different_layout_per_head)"
        self.want("num_different_global_patterns", 1 <= self.num_different_global_patterns <= most, takes)

    def blocks(self, head: int, count: int) -> Tensor:
        """Return the blocks, see `Layout.blocks`."""
        window = torch.arange(count) // self.num_local_blocks
        found = window[:, None] == window[None, :]
        turn = head % self.num_different_global_patterns
        first = self.num_local_blocks - (turn + 1) * self.num_global_blocks
        for start in range(0, count, self.num_local_blocks):
            begin = max(0, min(start + first, count - self.num_global_blocks))
            found[:, begin : begin + self.num_global_blocks] = True
            if self.horizontal_global_attention:
                found[begin : begin + self.num_global_blocks] = True
        return found


@dataclass(frozen=True, kw_only=True)
class Variable(Layout):
    """Windows of given sizes, global blocks, and random blocks.

    Attributes:
        num_random_blocks: Number of random blocks that each block of queries sees.
        local_window_blocks: Sizes of the first windows in blocks; the last size is repeated to the end.
        global_block_indices: Blocks that every query sees.
        global_block_end_indices: The end of each of them, exclusive, so that they are ranges of blocks.
        attention: "bidirectional" or "unidirectional".
        horizontal_global_attention: True if queries of those blocks see every key as well.
        seed: Seed of the random blocks.
    """

    mode: ClassVar[str] = "variable"

    num_random_blocks: int = 0
    local_window_blocks: tuple[int, ...] = (4,)
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _take_tuples(self, "local_window_blocks", "global_block_indices", "global_block_end_indices")
        self._want_attention()
        self.want("num_random_blocks", self.num_random_blocks >= 0, "0 or more")
        sizes = self.local_window_blocks
        self.want("local_window_blocks", bool(sizes) and min(sizes) >= 1, "sizes of 1 or more")
        _want_ranges(self)
        one_way = self.attention == "unidirectional"
        self.want("horizontal_global_attention", not (self.horizontal_global_attention and one_way), _ONE_WAY)

    def blocks(self, head: int, count: int) -> Tensor:
        """Return the blocks, see `Layout.blocks`."""
        found = torch.zeros(count, count, dtype=torch.bool)
        start, number = 0, 0
        while start < count:
            end = start + self.local_window_blocks[min(number, len(self.local_window_blocks) - 1)]
            found[start:end, start:end] = True
            start, number = end, number + 1
        _see_ranges(self, found, rows=self.horizontal_global_attention)
        return found | _random_blocks(self.num_random_blocks, count, seed=self.seed, head=head, causal=self.is_causal)


@dataclass(frozen=True, kw_only=True)
class BigBird(Layout):
    """A sliding window, first blocks that see all and are seen by all, and random blocks.

    Attributes:
        num_random_blocks: Number of random blocks that each block of queries sees.
        num_sliding_window_blocks: Width of the window, around each block.
        num_global_blocks: Number of first blocks that see all and are seen by all.
        attention: "bidirectional" or "unidirectional".
        seed: Seed of the random blocks.
    """

    mode: ClassVar[str] = "bigbird"

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._want_attention()
        self.want("num_random_blocks", self.num_random_blocks >= 0, "0 or more")
        self.want("num_sliding_window_blocks", self.num_sliding_window_blocks >= 1, "1 or more")
        self.want("num_global_blocks", self.num_global_blocks >= 0, "0 or more")

    def blocks(self, head: int, count: int) -> Tensor:
        """Return the blocks, see `Layout.blocks`."""
        found = _sliding(self.num_sliding_window_blocks, count)
        found[:, : self.num_global_blocks] = True
        found[: self.num_global_blocks] = True
        return found | _random_blocks(self.num_random_blocks, count, seed=self.seed, head=head, causal=self.is_causal)


@dataclass(frozen=True, kw_only=True)
class BSLongformer(Layout):
    """A sliding window, and blocks that see all and are seen by all.

    Attributes:
        num_sliding_window_blocks: Width of the window, around each block.
        global_block_indices: Blocks that see all and are seen by all.
        global_block_end_indices: The end of each of them, exclusive, so that they are ranges of blocks.
        attention: "bidirectional" or "unidirectional".
    """

    mode: ClassVar[str] = "bslongformer"

    num_sliding_window_blocks: int = 3
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        _take_tuples(self, "global_block_indices", "global_block_end_indices")
        self._want_attention()
        self.want("num_sliding_window_blocks", self.num_sliding_window_blocks >= 1, "1 or more")
        _want_ranges(self)

    def blocks(self, head: int, count: int) -> Tensor:
        """Return the blocks, see `Layout.blocks`."""
        found = _sliding(self.num_sliding_window_blocks, count)
        _see_ranges(self, found, rows=True)
        return found


@dataclass(frozen=True, kw_only=True)
class LocalSlidingWindow(Layout):
    """Only a sliding window.

    Attributes:
        num_sliding_window_blocks: Width of the window, around each block.
        attention: "unidirectional" or "bidirectional".
    """

    mode: ClassVar[str] = "local"

    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._want_attention()
        self.want("num_sliding_window_blocks", self.num_sliding_window_blocks >= 1, "1 or more")

    def blocks(self, head: int, count: int) -> Tensor:
        """Return the blocks, see `Layout.blocks`."""
        return _sliding(self.num_sliding_window_blocks, count)


_ONE_WAY = "False with attention='unidirectional'"


def _sliding(width: int, count: int) -> Tensor:
    """Return the blocks at most half of `width` away."""
    place = torch.arange(count)
    return (place[:, None] - place[None, :]).abs() <= width // 2


def _random_blocks(number: int, count: int, *, seed: int, head: int, causal: bool) -> Tensor:
    """Return `number` different random blocks for each row, of all or of those that are not later."""
    found = torch.zeros(count, count, dtype=torch.bool)
    if number == 0:
        return found
    generator = torch.Generator().manual_seed(seed * 1_000_003 + head)
    for row in range(count):
        among = row + 1 if causal else count
        found[row, torch.randperm(among, generator=generator)[:number]] = True
    return found


def _take_tuples(layout: Layout, *names: str) -> None:
    for name in names:
        object.__setattr__(layout, name, as_tuple(getattr(layout, name)))


def _want_ranges(layout: Variable | BSLongformer) -> None:
    starts, ends = layout.global_block_indices, layout.global_block_end_indices
    layout.want("global_block_indices", all(start >= 0 for start in starts), "numbers of blocks, 0 or more")
    if ends is not None:
        fits = len(ends) == len(starts) and all(a < b for a, b in zip(starts, ends, strict=True))
        layout.want("global_block_end_indices", fits, "one end, above its start, for each of global_block_indices")


def _see_ranges(layout: Variable | BSLongformer, found: Tensor, *, rows: bool) -> None:
    starts, ends = layout.global_block_indices, layout.global_block_end_indices
    for start, end in zip(starts, ends or [start + 1 for start in starts], strict=True):
        found[:, start:end] = True
        if rows:
            found[start:end] = True

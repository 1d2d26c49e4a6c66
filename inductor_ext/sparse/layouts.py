"""Layouts of block-sparse attention as data: the blocks of keys that each block of queries sees.

A layout does not depend on a length or on heads: `codes(heads, length)` are the blocks of one attention. Its `text` is
the complete layout in JSON: it is used in graphs and caches, and is the same on every rank.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import plain_tensors

SKIPPED, WHOLE = 0, 1


class SparseLayoutError(ValueError):
    """A layout, a field of it, or an argument of block-sparse attention that is not supported.

    Fix: use a value that the message names; docs/guides/long-sequences.md describes the layouts and their fields.
    """


@dataclass(frozen=True)
class BlockCodes:
    """The blocks of one attention.

    Attributes:
        block: Number of queries and keys of a block.
        codes: int16 `[heads or 1, n, n]`: 0 for a skipped block, 1 for a full one, 2 + i for one with the visible
            tokens `patterns[i]`.
        patterns: bool `[patterns, block, block]`.
    """

    block: int
    codes: Tensor
    patterns: Tensor

    @property
    def density(self) -> float:
        """The share of computed blocks."""
        with plain_tensors():
            return float((self.codes != SKIPPED).double().mean())

    def tokens(self, length: int) -> Tensor:
        """Return the blocks as a mask: bool `[heads or 1, length, length]`, True for visible keys."""
        known = torch.cat([torch.zeros(1, self.block, self.block), torch.ones(1, self.block, self.block)]).bool()
        whole = torch.cat([known, self.patterns])[self.codes.long()]
        return whole.transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :length, :length]

    def intersected(self, where: Tensor, pattern: Tensor) -> BlockCodes:
        """Intersect the blocks of `where`, bool `[n, n]`, with `pattern`, bool `[block, block]`.

        Blocks without visible tokens become skipped ones, those with all visible full ones.
        """
        codes, patterns = self.codes.clone(), list(self.patterns)
        chosen = where & (self.codes != SKIPPED)
        for code in torch.unique(self.codes[chosen]).tolist():
            left = pattern if code == WHOLE else patterns[code - 2] & pattern
            codes[chosen & (self.codes == code)] = code_of(left, patterns)
        return BlockCodes(self.block, codes, stacked(patterns, self.block))


def code_of(left: Tensor, patterns: list[Tensor]) -> int:
    """Return the code of a block with the visible tokens `left`, which is added to `patterns` if it is new."""
    if not left.any():
        return SKIPPED
    if left.all():
        return WHOLE
    for number, known in enumerate(patterns):
        if torch.equal(known, left):
            return number + 2
    patterns.append(left)
    return len(patterns) + 1


def stacked(patterns: list[Tensor], block: int) -> Tensor:
    """Return patterns as one tensor."""
    return torch.stack(patterns) if patterns else torch.zeros(0, block, block, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """The layout of computed blocks.

    Attributes:
        block: Number of queries and keys of a block, 1 or more.
        different_layout_per_head: True if heads may differ.
    """

    mode: ClassVar[str]

    block: int = 16
    different_layout_per_head: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value, usual = as_tuple(getattr(self, item.name)), item.default
            if isinstance(usual, tuple) or (usual is None and value is not None):
                fits = isinstance(value, tuple) and all(type(number) is int for number in value)
                self.want(item.name, fits, "a list of whole numbers")
            elif usual is not None:
                self.want(item.name, type(value) is type(usual), f"a value such as {usual!r}")
        self.want("block", self.block >= 1, "1 or more")

    @property
    def is_causal(self) -> bool:
        """True if no query sees a later key."""
        return getattr(self, "attention", "") == "unidirectional"

    @abstractmethod
    def blocks(self, head: int, count: int) -> Tensor:
        """Return the blocks of a head: bool `[count, count]`, before later keys are removed in causal layouts."""

    def codes(self, heads: int, length: int, *, causal: bool = False) -> BlockCodes:
        """Return the blocks of an attention with these numbers of heads and tokens.

        Args:
            heads: Number of heads of queries.
            length: Number of tokens of queries and keys; the last block may be partial.
            causal: True if queries see no later keys, whatever the layout says.
        """
        with plain_tensors():
            return self._finished(*self._drawn(heads, length), length, causal=causal)

    def _drawn(self, heads: int, length: int) -> tuple[Tensor, Tensor]:
        """Return codes and patterns, before later keys and those after the last token are removed."""
        count = -(-length // self.block)
        differing = heads if self.different_layout_per_head else 1
        found = torch.stack([self.blocks(head, count) for head in range(differing)]).to(torch.int16)
        return found, torch.zeros(0, self.block, self.block, dtype=torch.bool)

    def _finished(self, codes: Tensor, patterns: Tensor, length: int, *, causal: bool) -> BlockCodes:
        """Remove later keys if they must not be visible, and keys after the last token."""
        count = codes.shape[-1]
        if causal or self.is_causal:
            codes = codes * torch.ones(count, count, dtype=codes.dtype).tril()
        made = BlockCodes(self.block, codes, patterns)
        if causal or self.is_causal:
            made = made.intersected(torch.eye(count, dtype=torch.bool), _full(self.block).tril())
        over = count * self.block - length
        if over:
            last = torch.zeros(count, count, dtype=torch.bool)
            last[:, -1] = True
            kept = _full(self.block)
            kept[:, self.block - over :] = False
            made = made.intersected(last, kept)
        return made

    def density(self, heads: int, length: int, *, causal: bool = False) -> float:
        """Return the share of computed blocks; 1 / density is the ideal speed-up."""
        return self.codes(heads, length, causal=causal).density

    def flops(self, heads: int, length: int, head_dim: int, *, causal: bool = False) -> int:
        """Return the operations of the two products of one forward, a multiplication and an addition counted as two.

        A backward that recomputes scores takes 2.5 times as many.
        """
        codes = self.codes(heads, length, causal=causal).codes
        with plain_tensors():
            computed = int((codes != SKIPPED).sum()) * (heads // len(codes))
        return 4 * computed * self.block * self.block * head_dim

    @property
    def text(self) -> str:
        """The layout in JSON, without default values."""
        given = {
            item.name: value
            for item in fields(self)
            if (value := getattr(self, item.name)) != item.default or item.default is MISSING
        }
        return json.dumps({"mode": self.mode, **given}, sort_keys=True)

    def want(self, field: str, holds: bool, takes: str) -> None:
        """Refuse a field unless `holds`.

        Raises:
            SparseLayoutError: `holds` is False.
        """
        if not holds:
            raise SparseLayoutError(f"{type(self).__name__}: {field} is {getattr(self, field)!r}; it takes {takes}")

    def _want_attention(self) -> None:
        known = ("bidirectional", "unidirectional")
        self.want("attention", getattr(self, "attention", None) in known, " or ".join(map(repr, known)))


def _full(block: int) -> Tensor:
    return torch.ones(block, block, dtype=torch.bool)


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple, which a frozen layout may hold; anything else unchanged."""
    return tuple(value) if isinstance(value, list) else value

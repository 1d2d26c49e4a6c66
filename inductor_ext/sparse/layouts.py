"""Layouts of block-sparse attention as data: which blocks of queries see which blocks of keys.

A layout says nothing of a length or of heads until it is asked: `codes(heads, length)` are the blocks of one attention.
Its `text` is all of it, in JSON: what stands in graphs and in caches, the same on every rank.
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
    """A layout, or a field of one, cannot be taken."""


@dataclass(frozen=True)
class BlockCodes:
    """The blocks of one attention.

    Attributes:
        block: Queries and keys of a block.
        codes: int16 `[heads or 1, n, n]`: 0 for a block that is skipped, 1 for one that is computed whole, 2 + i for
            one of which `patterns[i]` counts.
        patterns: bool `[patterns, block, block]`.
    """

    block: int
    codes: Tensor
    patterns: Tensor

    @property
    def density(self) -> float:
        """The share of blocks that are computed."""
        with plain_tensors():
            return float((self.codes != SKIPPED).double().mean())

    def tokens(self, length: int) -> Tensor:
        """The same as a mask: bool `[heads or 1, length, length]`, True where a key counts."""
        known = torch.cat([torch.zeros(1, self.block, self.block), torch.ones(1, self.block, self.block)]).bool()
        whole = torch.cat([known, self.patterns])[self.codes.long()]
        return whole.transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :length, :length]

    def intersected(self, where: Tensor, pattern: Tensor) -> BlockCodes:
        """Leaves of the blocks of `where`, bool `[n, n]`, what `pattern`, bool `[block, block]`, leaves.

        Patterns of which nothing is left are skipped blocks, those of which all is left whole ones.
        """
        codes, patterns = self.codes.clone(), list(self.patterns)
        chosen = where & (self.codes != SKIPPED)
        for code in torch.unique(self.codes[chosen]).tolist():
            left = pattern if code == WHOLE else patterns[code - 2] & pattern
            codes[chosen & (self.codes == code)] = code_of(left, patterns)
        return BlockCodes(self.block, codes, stacked(patterns, self.block))


def code_of(left: Tensor, patterns: list[Tensor]) -> int:
    """The code of a block of which `left` counts, which is added to `patterns` if it is none of them."""
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
    """Patterns as one tensor."""
    return torch.stack(patterns) if patterns else torch.zeros(0, block, block, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """Which blocks are computed.

    Attributes:
        block: Queries and keys of a block, 1 or more.
        different_layout_per_head: Whether heads may differ.
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
        """Whether no query sees a later key."""
        return getattr(self, "attention", "") == "unidirectional"

    @abstractmethod
    def blocks(self, head: int, count: int) -> Tensor:
        """The blocks that a head computes: bool `[count, count]`, before later keys are taken from causal ones."""

    def codes(self, heads: int, length: int, *, causal: bool = False) -> BlockCodes:
        """The blocks of an attention of so many heads and tokens.

        Args:
            heads: Of queries.
            length: Tokens, of queries and of keys; a last block may stand over.
            causal: Whether queries see no later keys, whatever the layout says.
        """
        with plain_tensors():
            return self._finished(*self._drawn(heads, length), length, causal=causal)

    def _drawn(self, heads: int, length: int) -> tuple[Tensor, Tensor]:
        """Codes and patterns, before later keys and those behind the last token are taken away."""
        count = -(-length // self.block)
        differing = heads if self.different_layout_per_head else 1
        found = torch.stack([self.blocks(head, count) for head in range(differing)]).to(torch.int16)
        return found, torch.zeros(0, self.block, self.block, dtype=torch.bool)

    def _finished(self, codes: Tensor, patterns: Tensor, length: int, *, causal: bool) -> BlockCodes:
        """Takes later keys away where none may be seen, and those behind the last token."""
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
        """The share of blocks that are computed; 1 / density is the ideal speed-up."""
        return self.codes(heads, length, causal=causal).density

    def flops(self, heads: int, length: int, head_dim: int, *, causal: bool = False) -> int:
        """Operations of the two products of one forward, a multiplication and an addition counted as two.

        A backward that computes scores again takes 2.5 times as many.
        """
        codes = self.codes(heads, length, causal=causal).codes
        with plain_tensors():
            computed = int((codes != SKIPPED).sum()) * (heads // len(codes))
        return 4 * computed * self.block * self.block * head_dim

    @property
    def text(self) -> str:
        """The layout in JSON, what is default left out."""
        given = {
            item.name: value
            for item in fields(self)
            if (value := getattr(self, item.name)) != item.default or item.default is MISSING
        }
        return json.dumps({"mode": self.mode, **given}, sort_keys=True)

    def want(self, field: str, holds: bool, takes: str) -> None:
        """Refuses a field.

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
    """A list as a tuple, which a frozen layout may hold; anything else as it is."""
    return tuple(value) if isinstance(value, list) else value

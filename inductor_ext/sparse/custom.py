"""Layouts drawn by others: any boolean mask of blocks, and FlexAttention's mask functions."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .layouts import SKIPPED, WHOLE, Layout, SparseLayoutError, code_of, stacked

_LARGEST_CODE = torch.iinfo(torch.int16).max


@dataclass(frozen=True, kw_only=True)
class Custom(Layout):
    """A layout of single blocks, for one length; made by `from_block_mask` and `from_mask_mod`.

    Attributes:
        length: The number of tokens that it supports.
        heads: The number of heads that it supports, 1 for any.
        packed: The codes of the blocks, compressed.
        patterns: The visible tokens of partial blocks, compressed.
    """

    mode: ClassVar[str] = "custom"

    length: int = 0
    heads: int = 1
    packed: str = ""
    patterns: str = ""

    def blocks(self, head: int, count: int) -> Tensor:
        """Return the blocks, see `Layout.blocks`."""
        return self._codes()[head % self.heads] != SKIPPED

    def _drawn(self, heads: int, length: int) -> tuple[Tensor, Tensor]:
        """Return codes and patterns, see `Layout.codes`.

        Raises:
            SparseLayoutError: It was made for another length, or for another number of heads.
        """
        if length != self.length:
            raise SparseLayoutError(f"the layout was made for {self.length} tokens, and there are {length}")
        if self.heads not in (1, heads):
            raise SparseLayoutError(f"the layout was made for {self.heads} heads, and there are {heads}")
        bits = _unpack(self.patterns, torch.uint8)
        patterns = bits.view(-1, self.block, self.block).bool()
        return self._codes(), patterns

    def _codes(self) -> Tensor:
        count = -(-self.length // self.block)
        return _unpack(self.packed, torch.int16).view(self.heads, count, count)


def from_block_mask(mask: Tensor, *, block: int, length: int | None = None) -> Layout:
    """Return a layout with a mask of blocks.

    Args:
        mask: bool `[n, n]`, or `[heads, n, n]` if heads differ: True for a computed block.
        block: Number of queries and keys of a block.
        length: Number of tokens, if the last block is partial; by default n * block.

    Raises:
        SparseLayoutError: The mask has another shape or dtype.
    """
    if mask.dtype != torch.bool or mask.ndim not in (2, 3) or mask.shape[-1] != mask.shape[-2]:
        raise SparseLayoutError(
            f"a mask of blocks is bool [n, n] or [heads, n, n]; this is {mask.dtype} {list(mask.shape)}"
        )
    count = mask.shape[-1]
    length = count * block if length is None else length
    if -(-length // block) != count:
        raise SparseLayoutError(f"{count} blocks of {block} do not hold {length} tokens")
    codes = mask.reshape(-1, count, count).to(torch.int16)
    return _custom(codes, torch.zeros(0, block, block, dtype=torch.bool), block, length)


def from_mask_mod(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], *, length: int, heads: int = 1, block: int = 64
) -> Layout:
    """Return the layout of a FlexAttention mask function.

    Blocks without visible tokens are skipped. For partial blocks it stores the visible tokens.

    Args:
        mask_mod: The mask function, called as `mask_mod(b, h, q, k)` with 0-dimensional int64 tensors; b is 0.
        length: Number of tokens.
        heads: Number of heads, if the function distinguishes them; otherwise 1.
        block: Number of queries and keys of a block.

    Raises:
        SparseLayoutError: There are more kinds of blocks than codes.
    """
    count = -(-length // block)
    codes = torch.zeros(heads, count, count, dtype=torch.int16)
    patterns: list[Tensor] = []
    known: dict[bytes, int] = {}
    along_keys = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    along_both = torch.vmap(along_keys, in_dims=(None, None, 0, None))
    keys = torch.arange(count * block)
    for head in range(heads):
        for row in range(count):
            queries = torch.arange(row * block, (row + 1) * block)
            kept = along_both(torch.tensor(0), torch.tensor(head), queries, keys) & (keys < length)
            for column, tokens in enumerate(_completed(kept, length, row, block).split(block, dim=1)):
                key = tokens.contiguous().numpy().tobytes()
                if key not in known:
                    known[key] = code_of(tokens.clone(), patterns)
                codes[head, row, column] = known[key]
            if len(patterns) + WHOLE >= _LARGEST_CODE:
                raise SparseLayoutError(
                    f"from_mask_mod: more than {_LARGEST_CODE} kinds of blocks; take a smaller block"
                )
    return _custom(codes, stacked(patterns, block), block, length)


def _completed(kept: Tensor, length: int, row: int, block: int) -> Tensor:
    """Return `kept` with queries after the last token equal to the last one, so that full blocks stay full."""
    over = (row + 1) * block - length
    if over > 0:
        kept = kept.clone()
        kept[block - over :] = kept[block - over - 1]
    return kept


def _custom(codes: Tensor, patterns: Tensor, block: int, length: int) -> Custom:
    differs = len(codes) > 1
    return Custom(
        block=block,
        different_layout_per_head=differs,
        length=length,
        heads=len(codes),
        packed=_pack(codes),
        patterns=_pack(patterns.to(torch.uint8)),
    )


def _pack(tensor: Tensor) -> str:
    return base64.b64encode(zlib.compress(tensor.contiguous().numpy().tobytes(), 9)).decode()


def _unpack(text: str, dtype: torch.dtype) -> Tensor:
    raw = zlib.decompress(base64.b64decode(text))
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.zeros(0, dtype=dtype)

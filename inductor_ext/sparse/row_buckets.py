"""The pieces in which a block-sparse attention is computed: rows that see equally many blocks are batched.

Rows of blocks that see the same blocks in the same way become one unit: a longer product of fewer gathered keys. Units
of equal sizes become one bucket: one batched product.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .layouts import SKIPPED, WHOLE, BlockCodes
from .reading import codes_of


@dataclass(frozen=True)
class Bucket:
    """Units of equal sizes.

    Attributes:
        rows: Blocks of queries of each unit, int64 `[units, r]`; no two units share one.
        columns: Blocks of keys that all of them see, int64 `[units, c]`.
        allowed: bool `[r * block, c * block]`: the visible scores, the same in all units; None if all are visible.
    """

    rows: Tensor
    columns: Tensor
    allowed: Tensor | None


@lru_cache(maxsize=32)
def buckets_of(
    text: str, heads: int, length: int, *, causal: bool, most_scores: int | None
) -> tuple[tuple[Bucket, ...], ...]:
    """Return the buckets of each head; of one head if all are equal.

    Args:
        text: `Layout.text`.
        heads: Number of heads of queries.
        length: Number of tokens.
        causal: True if queries see no later keys, whatever the layout says.
        most_scores: Largest number of scores of a unit, unless one row of blocks has more; None: no limit.
    """
    found = codes_of(text, heads, length, causal=causal)
    return tuple(_buckets(found, head, most_scores) for head in range(len(found.codes)))


def _buckets(found: BlockCodes, head: int, most_scores: int | None) -> tuple[Bucket, ...]:
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = defaultdict(list)
    for row, codes in enumerate(found.codes[head]):
        columns = torch.nonzero(codes != SKIPPED).flatten()
        kinds = codes[columns]
        order = torch.argsort(kinds, stable=True)  # blocks that count in part last, so that more rows are alike
        if len(columns):
            alike[tuple(columns[order].tolist()), tuple(kinds[order].tolist())].append(row)
    sized: dict[tuple[int, tuple[int, ...]], list[tuple[list[int], tuple[int, ...]]]] = defaultdict(list)
    for (seen, key), rows in alike.items():
        most = len(rows) if most_scores is None else max(1, most_scores // (len(seen) * found.block**2))
        for start in range(0, len(rows), most):
            piece = rows[start : start + most]
            sized[len(piece), key].append((piece, seen))
    return tuple(
        Bucket(
            torch.tensor([rows for rows, _ in units]),
            torch.tensor([seen for _, seen in units]),
            _allowed(key, found, rows=count),
        )
        for (count, key), units in sized.items()
    )


def _allowed(kinds: tuple[int, ...], found: BlockCodes, *, rows: int) -> Tensor | None:
    if all(kind == WHOLE for kind in kinds):
        return None
    whole = torch.ones(found.block, found.block, dtype=torch.bool)
    return torch.cat([whole if kind == WHOLE else found.patterns[kind - 2] for kind in kinds], dim=1).repeat(rows, 1)

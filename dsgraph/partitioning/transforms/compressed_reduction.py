"""A compressed reduction in eager code, which leaves behind what a compiled one does."""

from __future__ import annotations

import torch
from torch import Tensor

CompressedInputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of a parameter whose gradient is compressed: momentum, the two errors and the coefficients of `reduce_compressed`."""


def reduce_compressed(
    grad: Tensor,
    shard: Tensor,
    compressed: CompressedInputs,
    over: tuple[str, bool],
) -> Tensor:
    """This rank's part of the averaged momentum. What is kept for the next time is left as `.grad` of its tensors.

    Args:
        grad: `[*shape]`, this rank's gradient.
        shard: This rank's part of the parameter.
        compressed: What is kept of the parameter.
        over: The group, and whether it splits the parameter's rows: `Layout.reduced_over`.
    """
    momentum, worker_error, owner_error, _ = compressed
    group, splits_rows = over
    with torch.no_grad():
        own, full, *errors = torch.ops.dsgraph.reduce_compressed(
            grad, shard.shape, *compressed, group=group, splits_rows=splits_rows
        )
    worker_error.grad, owner_error.grad = errors
    if splits_rows:
        momentum.grad = full
    return own

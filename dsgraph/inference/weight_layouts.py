"""Memory layouts of weights for generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def turn_weights(model: nn.Module) -> None:
    """Store the weights of transformers' `Conv1D` layers by columns, so that each output's numbers are neighbours.

    Shapes, values and names do not change. A skinny matmul then reads them as those of `nn.Linear`. One weight at a
    time is in memory twice. Float16 weights, which skinny matmuls do not use, are not changed.
    """
    for module in _of_columns(model):
        if module.weight.dtype == torch.float16:
            continue
        module.weight.data = module.weight.data.t().contiguous().t()


def turned_weights(model: nn.Module) -> int:
    """Return the number of weights that are stored as by `turn_weights`."""
    return sum(module.weight.t().is_contiguous() for module in _of_columns(model))


def _of_columns(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
            yield module

"""How weights lie in memory while an engine generates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def turn_weights(model: nn.Module) -> None:
    """Lays out the weights of transformers' `Conv1D` by columns, so that each output's numbers are neighbours.

    Their shapes, numbers and names stay. A skinny matmul then reads them as those of `nn.Linear`. One weight is
    in memory twice at a time. Those of float16, which no such product reads, stay as they are.
    """
    for module in _of_columns(model):
        if module.weight.dtype == torch.float16:
            continue
        module.weight.data = module.weight.data.t().contiguous().t()


def turned_weights(model: nn.Module) -> int:
    """How many weights lie as `turn_weights` leaves them."""
    return sum(module.weight.t().is_contiguous() for module in _of_columns(model))


def _of_columns(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
            yield module

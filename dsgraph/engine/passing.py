"""What goes into a model, and the loss in what comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsgraph import compat
from dsgraph.errors import EngineError


def cast_floating(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Inputs of a model, of which floating-point tensors are in `dtype`; None leaves them."""
    if dtype is None:
        return inputs
    return compat.map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs)


def loss_of(output: Any) -> Tensor:
    """The loss in what a model gives: the value itself, its `loss`, or the first of several."""
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, Tensor):
        raise EngineError(
            f"the model gives a {type(output).__name__} without a loss: return the loss, a tuple that begins with it, "
            "or an object with `loss`"
        )
    return loss

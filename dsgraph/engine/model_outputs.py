"""Finds the loss in the output of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.utils.errors import EngineError


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


@dataclass(frozen=True)
class Again:
    """A micro-batch whose gradients are computed again, at other values of the parameters.

    Attributes:
        run: Its forward.
    """

    run: Callable[[], Any]

    def gradients_of(self, model: nn.Module, *, scale: float) -> Callable[[], Mapping[str, Tensor]]:
        """What computes them: always with the same random numbers. Buffers stay as they are.

        Args:
            model: The module whose parameters they are of; it holds no gradients meanwhile.
            scale: Of the loss, by which gradients are divided again.
        """
        state = torch.get_rng_state()

        def compute() -> Mapping[str, Tensor]:
            buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
            kept = {name: param.grad for name, param in model.named_parameters()}
            model.zero_grad()
            with torch.random.fork_rng():
                torch.set_rng_state(state)
                (loss_of(self.run()) * scale).backward()
            found = {
                name: param.grad / scale if param.grad is not None else torch.zeros_like(param.detach())
                for name, param in model.named_parameters()
            }
            for name, param in model.named_parameters():
                param.grad = kept[name]
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            return found

        return compute

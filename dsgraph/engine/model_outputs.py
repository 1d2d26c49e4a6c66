"""Finds the loss in the output of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.utils.errors import EngineError


def loss_of(output: Any) -> Tensor:
    """Return the loss in a model's output: the value itself, its `loss`, or the first of several."""
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, Tensor):
        raise EngineError(
            f"the model returned a {type(output).__name__} without a loss: return it, a tuple that begins with it, "
            "or an object with `loss`"
        )
    return loss


@dataclass(frozen=True)
class Again:
    """A micro-batch whose gradients are recomputed at other values of the parameters.

    Attributes:
        run: Its forward.
    """

    run: Callable[[], Any]

    def gradients_of(self, model: nn.Module, *, scale: float) -> Callable[[], Mapping[str, Tensor]]:
        """Return a function that recomputes the gradients with the same random numbers; buffers do not change.

        Args:
            model: The module whose parameters' gradients are computed; it holds no gradients during the call.
            scale: The loss scale, by which gradients are divided.
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

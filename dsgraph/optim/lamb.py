"""LAMB: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv 1904.00962).

For each parameter p with gradient g, at step t = 1, 2, ...:

    m = beta1 * m + (1 - beta1) * g                     v = beta2 * v + (1 - beta2) * g^2
    u = m / (sqrt(v) + eps) + weight_decay * p
    r = clip(|p| / |u|, min_coeff, max_coeff), or 1 where one of the norms is 0
    p = p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * r * u

The norms are those of the full parameter: squares of shards are summed over ranks, for all parameters at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsgraph.partitioning.rows import own_part, split_dims

from .hooks import evaluated


class Lamb(Optimizer):
    """LAMB over plain parameters and shards.

    Attributes:
        ratios: r of the last step for each parameter: a number on its device.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            **{"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay},
            **{"bias_correction": bias_correction, "max_coeff": max_coeff, "min_coeff": min_coeff},
        }
        super().__init__(params, defaults)
        self.ratios: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = evaluated(closure)
        work = [
            (param, group, self._direction(param, group))
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        norms = norms_of([(param, own_part(param), update) for param, _, update in work])
        for (param, group, update), (weight, size) in zip(work, norms, strict=True):
            ratio = (weight / size).clamp(group["min_coeff"], group["max_coeff"])
            ratio = torch.where((weight > 0) & (size > 0), ratio, torch.ones_like(ratio))
            self.ratios[param] = ratio
            own_part(param).sub_(update * (ratio * self._rate(param, group)))
            if isinstance(param, DTensor):
                torch.autograd.graph.increment_version(param)
        return loss

    def _direction(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the averages, and return this rank's part of the update, without its rate."""
        here, grad = own_part(param), own_part(param.grad)  # type: ignore[arg-type]
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = own_part(state["exp_avg"]), own_part(state["exp_avg_sq"])
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return (exp_avg / (exp_avg_sq.sqrt() + group["eps"])).add_(here, alpha=group["weight_decay"])

    def _rate(self, param: Tensor, group: dict[str, Any]) -> float:
        rate = float(group["lr"])
        if not group["bias_correction"]:
            return rate
        beta1, beta2 = group["betas"]
        step = int(self.state[param]["step"])
        return rate * math.sqrt(1 - beta2**step) / (1 - beta1**step)


def norms_of(parts: list[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return the norms of each full parameter and its update, from this rank's parts: one reduction a group."""
    squares = [torch.stack([part.square().sum(dtype=torch.float32) for part in pair]) for _, *pair in parts]
    split: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
    for number, (param, *_) in enumerate(parts):
        for dim in split_dims(param):
            split[param.device_mesh.get_group(dim)].append(number)  # type: ignore[attr-defined]
    for group, numbers in split.items():
        together = torch.stack([squares[number] for number in numbers])
        dist.all_reduce(together, group=group)
        for number, value in zip(numbers, together, strict=True):
            squares[number] = value
    return [(roots[0], roots[1]) for roots in (square.sqrt() for square in squares)]

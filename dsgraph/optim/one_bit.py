"""1-bit Adam and 1-bit LAMB.

Tang et al.: 1-bit Adam (arXiv 2102.02888); Li et al.: 1-bit LAMB (arXiv 2104.06069). The first `freeze_step` steps are
those of Adam or LAMB. Then the variance v is frozen, and the gradient of a parameter is its averaged momentum m, see
`dsgraph/inductor_ext/collectives/compressed_reduction.py`. At step t, with T the last step of the warm-up:

    Adam:   p = (1 - lr * weight_decay) * p
            p = p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^T)) + eps)

    LAMB:   d = sqrt(v) + eps;  u = m / d + weight_decay * p
            g = (m - beta1 * m_before) / (1 - beta1);  w = beta2 * w + (1 - beta2) * g^2           w = v at T
            f = max over the parameter of d / (sqrt(w) + eps) * sqrt((1 - beta2^t) / (1 - beta2^T))
            f = f * s + 1 - s, with s = min(1, |m / d| / |u|)
            f = f clipped to [factor_min, factor_max], then to f_before * (1 -+ factor_threshold)
            p = p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * c * f * u

c is the average of LAMB's ratio over the warm-up, with decay `coeff_beta`. Averages begin at 0, which makes a variance
too small by the factor 1 - beta2^t. LAMB's rate corrects that, as in the warm-up; f compares variances without this
bias. Otherwise the bias alone would make w / v grow, and f would shrink steps after a short warm-up.

Momenta need no common scale over layers, unlike in the paper: each parameter is compressed with scales of its own. If v
is 0 at T, all gradients were 0 so far. Such elements are not updated, because their momentum would be divided by 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsgraph.partitioning.rows import own_part, split_dims

from .compressed_optimizer import FREEZE_STEP, CompressingOptimizer, Momentum
from .lamb import Lamb, norms_of


class OneBitAdam(CompressingOptimizer):
    """1-bit Adam over the parameters of a partitioned model."""

    def __init__(
        self,
        params: Iterable[Any],
        model: nn.Module,
        lr: float = 1e-3,
        freeze_step: int = FREEZE_STEP,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **others: Any,
    ) -> None:
        """Create the optimizer; parameters are given as for `torch.optim.AdamW`.

        Args:
            params: Parameters as for `torch.optim`.
            model: The model of these parameters.
            lr: The learning rate.
            freeze_step: Steps of the warm-up.
            betas: Decay of momentum and variance.
            eps: Added to the root of the variance.
            weight_decay: Decoupled from the gradient.
            others: Further arguments of DeepSpeed's optimizer; see `CompressingOptimizer.prepare`.
        """
        self._warm = torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        super().__init__(self._warm.param_groups, {})
        self._warm.param_groups = self.param_groups
        self._warm.state = self.state
        self.prepare(model, freeze_step, others)

    def warm_step(self) -> None:
        """Make a step of AdamW."""
        self._warm.param_groups, self._warm.state = self.param_groups, self.state
        self._warm.step()

    def freeze(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Keep the variance without its bias; infinite where it is 0, so that nothing is divided by it."""
        variance = own_part(state["exp_avg_sq"])
        variance.div_(1 - group["betas"][1] ** int(state["step"]))
        variance.masked_fill_(variance == 0, math.inf)

    def compressed_step(self, momenta: list[Momentum]) -> None:
        """Update the parameters by the formula in the module's docstring."""
        for each, step in zip(momenta, count_steps(momenta), strict=True):
            here, group = own_part(each.param), each.group
            each.before.copy_(each.now)
            divisor = own_part(each.state["exp_avg_sq"]).sqrt().add_(group["eps"])
            here.mul_(1 - group["lr"] * group["weight_decay"])
            here.addcdiv_(each.now, divisor, value=-group["lr"] / (1 - group["betas"][0] ** step))
            torch.autograd.graph.increment_version(each.param)


class OneBitLamb(CompressingOptimizer):
    """1-bit LAMB over the parameters of a partitioned model."""

    def __init__(
        self,
        params: Iterable[Any],
        model: nn.Module,
        lr: float = 1e-3,
        freeze_step: int = FREEZE_STEP,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **others: Any,
    ) -> None:
        """Create the optimizer; parameters are given as for `Lamb`.

        Args:
            params: Parameters as for `torch.optim`.
            model: The model of these parameters.
            lr: The learning rate.
            freeze_step: Steps of the warm-up.
            betas: Decay of momentum and variance.
            eps: Added to the root of the variance.
            weight_decay: Factor of the parameter in its update.
            max_coeff: The largest ratio of the warm-up.
            min_coeff: The smallest one.
            coeff_beta: Decay of the average of ratios.
            factor_max: The largest factor of the ratio after the warm-up.
            factor_min: The smallest one.
            factor_threshold: Largest relative change of the factor in a step.
            others: Further arguments of DeepSpeed's optimizer; see `CompressingOptimizer.prepare`.
        """
        how = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        ratios = {"max_coeff": max_coeff, "min_coeff": min_coeff}
        self._warm = Lamb(params, **how, **ratios)  # type: ignore[arg-type]
        factors = {"factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold}
        super().__init__(self._warm.param_groups, {"coeff_beta": coeff_beta, **factors})
        self.prepare(model, freeze_step, others)

    def warm_step(self) -> None:
        """Make a step of LAMB, whose ratios are averaged."""
        self._warm.param_groups, self._warm.state = self.param_groups, self.state
        self._warm.step()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, beta = self.state[param], group["coeff_beta"]
                ratio = self._warm.ratios[param]
                average = state.setdefault("coefficient", torch.zeros_like(ratio))
                average.copy_(torch.where(ratio == 1, average, beta * average + (1 - beta) * ratio))

    def freeze(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Keep the variance, infinite where it is 0, and a second one that is updated further."""
        variance = state["exp_avg_sq"]
        state["fresh_sq"] = variance.clone()
        state["bias"] = torch.tensor(_bias(int(state["step"]), group))
        state["factor"] = torch.ones_like(state["coefficient"])
        own_part(variance).masked_fill_(own_part(variance) == 0, math.inf)

    def compressed_step(self, momenta: list[Momentum]) -> None:
        """Update the parameters by the formula in the module's docstring."""
        directions, largest = [], []
        steps = count_steps(momenta)
        for each in momenta:
            beta1, beta2 = each.group["betas"]
            frozen, fresh = own_part(each.state["exp_avg_sq"]), own_part(each.state["fresh_sq"])
            divisor = frozen.sqrt().add_(each.group["eps"])
            grad = (each.now - each.before * beta1) / (1 - beta1)
            fresh.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            shrinks = torch.where(frozen.isinf(), 0.0, divisor / fresh.sqrt().add_(each.group["eps"]))
            largest.append(shrinks.max() if shrinks.numel() else shrinks.new_zeros(()))
            direction = each.now / divisor
            directions.append((direction, direction + each.group["weight_decay"] * own_part(each.param)))
        lengths = norms_of([(each.param, *pair) for each, pair in zip(momenta, directions, strict=True)])
        for each, step, (_, update), (alone, both), most in zip(
            momenta, steps, directions, lengths, _over_ranks(momenta, largest), strict=True
        ):
            self._update(each, step, update, share=(alone / both).clamp(max=1.0), factor=most)

    def _update(self, each: Momentum, step: int, update: Tensor, *, share: Tensor, factor: Tensor) -> None:
        group, state = each.group, each.state
        bias = _bias(step, group)
        factor = factor * (bias / float(state["bias"])) * share + 1 - share
        before, threshold = state["factor"], group["factor_threshold"]
        factor = factor.clamp(group["factor_min"], group["factor_max"])
        factor = factor.clamp(before * (1 - threshold), before * (1 + threshold))
        state["factor"].copy_(factor)
        rate = group["lr"] * bias / (1 - group["betas"][0] ** step)
        each.before.copy_(each.now)
        own_part(each.param).sub_(update * (state["coefficient"] * factor * rate))
        torch.autograd.graph.increment_version(each.param)


def count_steps(momenta: list[Momentum]) -> list[int]:
    """Count a step of each parameter; return their numbers, for which the host waits once."""
    if not momenta:
        return []
    counts = [each.state["step"].add_(1) for each in momenta]
    return [int(count) for count in torch.stack(counts).tolist()]


def _bias(step: int, group: dict[str, Any]) -> float:
    """Return the factor by which the root of a variance is too small at a step, because it began at 0."""
    return math.sqrt(1 - group["betas"][1] ** step)


def _over_ranks(momenta: list[Momentum], largest: list[Tensor]) -> list[Tensor]:
    """Return the largest value over all rows of each parameter; for sharded ones over ranks, in one reduction."""
    if not momenta:
        return []
    together = torch.stack(largest)
    split = [param for param in (each.param for each in momenta) if isinstance(param, DTensor)]
    groups = {param.device_mesh.get_group(dim): None for param in split for dim in split_dims(param)}
    for group in groups:
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    return list(together)

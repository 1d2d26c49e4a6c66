"""The global gradient norm and clipping, of gradients of which each rank holds parts.

    rank 0    rank 1    split over
    g[:2]     g[2:]     the group       both parts count
    h         h         nothing         one of them counts

With several groups, a part may be split over any of them: rows over data-parallel ranks, slices over tensor-parallel
ranks, stages over a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from dsgraph.compat.tensors import scale_all
from dsgraph.inductor_ext import Ranks, sum_over
from dsgraph.partitioning.rows import own_part
from dsgraph.partitioning.state import PartitionState


@dataclass(frozen=True)
class GradientPart:
    """This rank's part of a gradient.

    Attributes:
        grad: The part.
        split: Names of the process groups over which the gradient is split. The other ranks of a group hold other
            parts; the ranks of any other group hold the same part.
        is_counted: False for a copy of what another rank of `split` counts, such as of a tied parameter.
    """

    grad: Tensor
    split: frozenset[str] = frozenset()
    is_counted: bool = True


@dataclass(frozen=True)
class LocalGradients:
    """This rank's part of all gradients of a step.

    Attributes:
        parts: The parts.
        groups: Names of all process groups over which gradients may be split, in the same order on all ranks.
        device: Device of the parameters.
    """

    parts: Sequence[GradientPart]
    groups: tuple[str, ...]
    device: torch.device

    def norm(self) -> float:
        """Return the 2-norm of all gradients as one vector; not finite if one of them is not.

        All ranks of the groups call it together. A few numbers are sent, and the host waits for them once.
        """
        squares = torch.zeros([2] * len(self.groups), dtype=torch.float64, device=self.device)
        counted = [part for part in self.parts if part.is_counted]
        for split in {part.split for part in counted}:
            place = tuple(int(group in split) for group in self.groups)
            squares[place] = _square([part.grad for part in counted if part.split == split])
        for group in self.groups:
            squares = squares[0] + sum_over(squares[1], [Ranks.of(group)])
        return math.sqrt(float(squares))

    def unscale_and_clip(self, *, scale: float, max_norm: float) -> float:
        """Divide the gradients by the loss scale, and scale them so that their norm is at most `max_norm`.

        All ranks of the groups call it together. If a gradient is not finite, all gradients stay as they are.

        Args:
            scale: The loss scale.
            max_norm: The largest norm; 0 disables clipping.

        Returns:
            The norm of the unscaled gradients before clipping.
        """
        norm = self.norm() / scale
        if not math.isfinite(norm):
            return norm
        factor = 1 / scale
        if max_norm and norm > max_norm:
            factor *= max_norm / (norm + 1e-6)
        if factor != 1:
            with torch.no_grad():
                scale_all([part.grad for part in self.parts], factor)
        return norm


def gradients_of(
    partition: PartitionState, *, sliced: frozenset[str] = frozenset(), slicing: str = ""
) -> LocalGradients:
    """Return this rank's rows of the gradients of a partitioned model.

    Args:
        partition: The model.
        sliced: Names of the parameters that the model's own code has made tensor-parallel over the ranks of `slicing`.
        slicing: Name of their process group; empty if there is none.
    """
    held = {entry.name: entry.spec.held.group for entry in partition.parameters if entry.spec.held is not None}
    held |= dict.fromkeys(sliced, slicing)
    groups = dict.fromkeys(entry.spec.group for entry in partition.parameters if entry.spec.group)
    parts = []
    for entry in partition.parameters:
        if entry.param.grad is not None:
            split = {entry.spec.group, held.get(entry.name, "")} - {""}
            parts.append(GradientPart(own_part(entry.param.grad), frozenset(split)))
    device = partition.parameters[0].param.device
    return LocalGradients(parts, (*groups, *dict.fromkeys([*held.values(), *([slicing] if slicing else [])])), device)


def _square(grads: Sequence[Tensor]) -> Tensor:
    """Return the square of the joint norm of plain tensors, in float64."""
    full = [grad for grad in grads if grad.dtype.itemsize >= 4]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads if grad.dtype.itemsize < 4]
    norms += [get_total_norm(full)] if full else []
    return torch.stack([norm.to(torch.float64) for norm in norms]).square().sum()

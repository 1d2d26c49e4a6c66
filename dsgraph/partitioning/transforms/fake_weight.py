"""A parameter that modules compute with as if it had few bits, while its shards stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from .parameter_transform import ParameterTransform


@dataclass(frozen=True, eq=False)
class FakeWeight(ParameterTransform):
    """How a weight is rounded wherever its modules hand it out: see `fake_quantize`.

    Attributes:
        control: [3], which whoever trains writes to.
        groups: As the next three, an argument of the op.
        transposed: Likewise.
        symmetric: Likewise.
        stochastic: Likewise.
    """

    is_copied: ClassVar[bool] = True

    control: Tensor
    groups: int
    transposed: bool
    symmetric: bool
    stochastic: bool

    @override
    def after_gather(self, full: Tensor) -> Tensor:
        """Return the rounded weight; gradients go straight through."""
        return torch.ops.dsgraph.fake_quantize(
            full,
            self.control,
            groups=self.groups,
            transposed=self.transposed,
            symmetric=self.symmetric,
            stochastic=self.stochastic,
        )

"""Fake quantization of a parameter: modules compute with the rounded weight, while its shards stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from .parameter_transform import ParameterTransform


@dataclass(frozen=True, eq=False)
class FakeWeight(ParameterTransform):
    """Fake quantization of a weight wherever its modules read it: see `fake_quantize`.

    Attributes:
        control: [3], written to by the training technique.
        groups: Argument of the op.
        transposed: Argument of the op.
        symmetric: Argument of the op.
        stochastic: Argument of the op.
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

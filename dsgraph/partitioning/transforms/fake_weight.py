"""A parameter that modules compute with as if it had few bits, while its shards stay as they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class FakeWeight(NamedTuple):
    """How a weight is rounded wherever its modules hand it out: see `fake_quantize`.

    Attributes:
        control: [3], which whoever trains writes to.
        groups: As the next three, an argument of the op.
        transposed: Likewise.
        symmetric: Likewise.
        stochastic: Likewise.
    """

    control: Tensor
    groups: int
    transposed: bool
    symmetric: bool
    stochastic: bool

    def of(self, full: Tensor) -> Tensor:
        """The rounded weight; gradients go straight through."""
        return torch.ops.dsgraph.fake_quantize(
            full,
            self.control,
            groups=self.groups,
            transposed=self.transposed,
            symmetric=self.symmetric,
            stochastic=self.stochastic,
        )

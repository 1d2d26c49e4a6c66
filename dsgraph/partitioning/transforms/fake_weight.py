"""Fake quantization of a parameter: modules compute with the rounded weight, while its shards stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dsgraph.inductor_ext import resolve_group
from dsgraph.passes.ir.parameters import ParameterSlice

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
        held: The slice of the weight that is gathered here, on a tensor-parallel rank; None: the full weight.
    """

    is_copied: ClassVar[bool] = True

    control: Tensor
    groups: int
    transposed: bool
    symmetric: bool
    stochastic: bool
    held: ParameterSlice | None = None

    @override
    def after_gather(self, full: Tensor) -> Tensor:
        """Return the rounded weight, or its slice; gradients go straight through."""
        if self.held is None or self._rounds_slices:
            return self._rounded(full)
        rank = resolve_group(self.held.group).rank()
        return self.held.own(self._rounded(self.held.full(full)), rank)

    @override
    def working_bytes(self, numbers: int) -> int:
        """Return the bytes of what the op computes, in float32 and int64, and of a weight that is gathered."""
        gathered = 1 if self.held is None or self._rounds_slices else self.held.ranks
        return numbers * gathered * (56 if self.stochastic else 32)

    @property
    def _rounds_slices(self) -> bool:
        """True if a slice is rounded like the full weight: it has all numbers of its output channels."""
        held = self.held
        channel = 1 if self.transposed else 0
        return held is not None and held.dim == channel and not self.groups and not self.stochastic

    def _rounded(self, weight: Tensor) -> Tensor:
        return torch.ops.dsgraph.fake_quantize(
            weight,
            self.control,
            groups=self.groups,
            transposed=self.transposed,
            symmetric=self.symmetric,
            stochastic=self.stochastic,
        )

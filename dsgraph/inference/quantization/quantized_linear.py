"""A linear layer whose weight has 8 or 4 bits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from dsgraph.inductor_ext.quant.weights import (
    dequantize_groups,
    dequantize_rows,
    multiply_groups,
    multiply_rows,
    quantize_groups,
    quantize_rows,
)


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight: `x @ weight.t() + bias`; it has no gradients.

    Attributes:
        in_features: Columns of the weight.
        out_features: Rows of the weight.
        bits: 8 or 4.
    """

    packed: Tensor
    scale: Tensor
    least: Tensor | None
    bias: Tensor | None
    weight = None
    """Always None: models that read its dtype, as T5 does, see that there is no floating-point weight."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        bits: Literal[8, 4],
        group: int,
        rounded: tuple[Tensor, Tensor, Tensor | None] | None = None,
    ) -> None:
        """Round a weight.

        Args:
            weight: Floating point, (out_features, in_features).
            bias: (out_features,), not rounded.
            bits: 8: one scale a row. 4: one scale and minimum a group.
            group: Number of neighbours in a row that share a scale, for 4 bits.
            rounded: The packed weight, scales and minima (None for 8 bits); None: it is rounded to nearest.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits = bits
        if rounded is not None:
            packed, scale, least = rounded
        elif bits == 8:
            (packed, scale), least = quantize_rows(weight), None
        else:
            packed, scale, least = quantize_groups(weight, group=group)
        # Rounding keeps the strides of its weight, and a skinny matmul reads rows of neighbours.
        self.register_buffer("packed", packed.contiguous())
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("least", None if least is None else least.contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        rows = x.reshape(-1, self.in_features)
        if self.least is None:
            result = multiply_rows(rows, self.packed, self.scale)
        else:
            result = multiply_groups(rows, self.packed, self.scale, self.least)
        if self.bias is not None:
            result = result + self.bias.to(result.dtype)
        return result.reshape(*x.shape[:-1], self.out_features)

    def dequantized(self) -> Tensor:
        """Return the weight as it is used, float32 (out_features, in_features)."""
        if self.least is None:
            return dequantize_rows(self.packed, self.scale)
        return dequantize_groups(self.packed, self.scale, self.least)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # `model.to(torch.bfloat16)` converts activations; scales stay float32, as the weight was rounded with them.
        scale, least = self.scale, self.least
        super()._apply(fn, recurse)
        if self.scale.dtype != torch.float32:
            self.scale = scale.to(self.scale.device)
            self.least = None if least is None else least.to(self.scale.device)
        return self

    def extra_repr(self) -> str:
        """Return the text for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"

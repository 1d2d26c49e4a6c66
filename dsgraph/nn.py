"""Modules that use dsgraph's ops."""

from __future__ import annotations

from torch import Tensor, nn

from dsgraph.inductor_ext.sparse.layouts import Layout
from dsgraph.inductor_ext.sparse.patterns import Fixed
from dsgraph.ops import block_sparse_attention

__all__ = ["SparseSelfAttention"]


class SparseSelfAttention(nn.Module):
    """Self-attention that computes only the blocks of a layout.

    It has no parameters: projections belong to the model.

    Attributes:
        layout: The computed blocks.
        dropout: The share of probabilities that is dropped in training.
        causal: True if queries see no later keys, whatever the layout says.
        scale: The factor of the scores; None: 1 / sqrt(width).
    """

    def __init__(
        self, layout: Layout | None = None, *, dropout: float = 0.0, causal: bool = False, scale: float | None = None
    ) -> None:
        super().__init__()
        self.layout = Fixed() if layout is None else layout
        self.dropout = dropout
        self.causal = causal
        self.scale = scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Return the attention; arguments and result are those of `dsgraph.ops.block_sparse_attention`."""
        return block_sparse_attention(
            query,
            key,
            value,
            self.layout,
            mask=mask,
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
            causal=self.causal,
            scale=self.scale,
        )

    def extra_repr(self) -> str:
        """Return the layout, and the settings that differ from the defaults."""
        return f"{self.layout}, dropout={self.dropout}, causal={self.causal}"

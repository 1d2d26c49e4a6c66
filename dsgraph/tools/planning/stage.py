"""Transformer layers as `dsgraph plan` counts them: layer norms, plain attention whose scores are kept, dropout."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_DROPOUT = 0.1


class Attention(nn.Module):
    """Causal attention.

    The number of heads follows from the width of its products, which may be a tensor-parallel shard.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor, later: Tensor) -> Tensor:
        """Map [batch, time, hidden] to the same shape. `later`: [time, time] bool, what a token must not see."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.size)
        shares = F.dropout(scores.masked_fill(later, -math.inf).softmax(-1), _DROPOUT, self.training)
        return self.out((shares @ value).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A pre-norm layer with a feed-forward part of four times its width."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, later: Tensor) -> Tensor:
        """Map [batch, time, hidden] to the same shape. `later`: see `Attention`."""
        x = x + F.dropout(self.attention(self.attention_norm(x), later), _DROPOUT, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.feed_forward_norm(x)))), _DROPOUT, self.training)


class Stage(nn.Module):
    """The layers of one stage of a pipeline, without embeddings and head."""

    def __init__(self, hidden: int, heads: int, *, layers: int, checkpointing: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, time, hidden] to the same shape."""
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            x = checkpoint(layer, x, later, use_reentrant=False) if self.checkpointing else layer(x, later)
        return x

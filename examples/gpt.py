"""A small GPT: pre-norm, causal attention with rotary positions, SiLU feed-forward. Plain torch, one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. `tie` shares the embedding with the output layer."""

    vocab: int = 256
    width: int = 256
    heads: int = 4
    layers: int = 4
    dropout: float = 0.0
    tie: bool = False


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:  # [..., width] -> [..., width]
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return (x.float() * scale).type_as(x) * self.weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary positions. x: [batch, heads, time, size]; angles: [time, size / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().type_as(x), angles.sin().type_as(x)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # [batch, time, width] -> the same
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.width), RMSNorm(config.width)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # [batch, time, width] -> the same
        x = x + self.dropout(self.attention(self.norm1(x), angles))
        return x + self.dropout(self.down(F.silu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tie:
            self.head.weight = self.embedding.weight
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, RMSNorm):
            module.reset_parameters()

    def logits(self, tokens: Tensor) -> Tensor:  # [batch, time] int64 -> [batch, time, vocab]
        size = self.config.width // self.config.heads
        frequencies = 10_000 ** (-torch.arange(0, size, 2, device=tokens.device) / size)  # [size / 2]
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequencies  # [time, size / 2]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # both [batch, time] int64 -> mean loss in nats
        return F.cross_entropy(self.logits(tokens).float().flatten(0, 1), targets.flatten())

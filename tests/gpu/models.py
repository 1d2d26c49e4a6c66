"""The model of the GPU tests, its batches, and what trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from examples.gpt import GPT, GPTConfig

SIZES = {"vocab": 512, "width": 128, "heads": 4, "layers": 2}


def build(**sizes: Any) -> GPT:
    """Return a GPT on the CPU, always with the same values."""
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SIZES, **sizes}))


def build_checkpointed(**sizes: Any) -> GPT:
    """Return a GPT each of whose blocks is recomputed in the backward."""
    model = build(**sizes)
    for block in model.blocks:
        block.forward = lambda *args, forward=block.forward: checkpoint(forward, *args, use_reentrant=False)
    return model


def batch(device: torch.device, *, rows: int = 4, length: int = 128) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, always the same."""
    tokens = torch.randint(0, SIZES["vocab"], (2, rows, length), generator=torch.Generator().manual_seed(1))
    return tuple(tokens.to(device))


def train(model: nn.Module, run: Callable[..., Tensor], data: tuple[Tensor, Tensor], *, steps: int = 3) -> list[float]:
    """Return the loss of each step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = run(*data)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def full(tensor: Tensor) -> Tensor:
    """Return all rows of a parameter or a gradient, in host memory if ranks share them.

    `full_tensor` of a CUDA tensor over gloo ends the process with a segmentation fault (torch 2.11.0).
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    own = tensor.to_local().detach().cpu()
    if not any(isinstance(placement, Shard) for placement in tensor.placements):
        return own
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return torch.cat(parts)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a parameter or a gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

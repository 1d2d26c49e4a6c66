"""Gathered copies of many parameters travel in a few collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dsgraph


class _Collectives(TorchDispatchMode):
    """The collectives that eager code starts, with the number of tensors in each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in str(func):
            self.found.append((func.__name__.partition(".")[0], len(args[0]) if isinstance(args[0], list) else 1))
        return func(*args, **(kwargs or {}))


def test_many_copies_are_gathered_by_three_collectives(fake_ranks):
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(40)))
    model = dsgraph.partition(layers, stage=1, keep_whole_below=0)
    x = torch.randn(2, 8)
    model(x)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    with _Collectives() as collectives:
        model(x)
    assert collectives.found == [("allgather_into_tensor_coalesced_", count) for count in (14, 14, 12)]

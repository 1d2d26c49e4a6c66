"""Peak memory of a head's forward and backward, by torch's CPU allocator; one program, as the counter stays.

python -m tests.inductor_ext.kernels.head_memory LIBRARY, with what `benchmarks.memory.build_counter` has built, prints
{"plain": bytes, "fused": bytes}: the most that was alive beyond inputs, gradients left by neither.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.memory import AllocationCounter
from dsgraph.inductor_ext import linear_cross_entropy

ROWS, VOCABULARY, HIDDEN = 2048, 16384, 64  # 128 MiB of logits


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The head with all logits in memory."""
    return functional.cross_entropy(functional.linear(hidden, weight), target)


def peak(loss: Callable[[Tensor, Tensor, Tensor], Tensor], counter: AllocationCounter) -> int:
    """Bytes beyond those of the inputs, at most alive in a forward and a backward."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    target = torch.randint(VOCABULARY, (ROWS,))
    before = counter.live
    counter.reset_peak()
    loss(hidden, weight, target).backward()
    return counter.peak - before


if __name__ == "__main__":
    counted = AllocationCounter(Path(sys.argv[1]))
    print(json.dumps({"plain": peak(plain, counted), "fused": peak(linear_cross_entropy, counted)}))

"""Cases of `benchmarks.sparse`: one attention of BERT-base's shape, dense and in blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import Tensor

import dsgraph
from benchmarks.memory import process_bytes
from dsgraph.sparse import BSLongformer, Fixed, Layout

HEADS, WIDTH = 12, 64  # BERT-base
LAYOUTS: dict[str, Layout] = {
    "fixed": Fixed(block=16, num_local_blocks=32),
    "bslongformer": BSLongformer(block=64, num_sliding_window_blocks=9),
}


def inputs(length: int) -> list[Tensor]:
    """Return query, keys, values and a gradient, laid out as a model's projections are: `[1, heads, length, width]`."""
    torch.manual_seed(0)
    made = [torch.randn(1, length, HEADS, WIDTH).transpose(1, 2) for _ in range(4)]
    return [*(item.requires_grad_() for item in made[:3]), made[3]]


def attention_of(system: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return an attention by name: "dense", "eager", or one of LAYOUTS."""
    if system == "dense":
        return F.scaled_dot_product_attention
    if system == "eager":
        return lambda q, k, v: (q @ k.transpose(-2, -1) / WIDTH**0.5).softmax(-1) @ v
    return lambda q, k, v: dsgraph.ops.block_sparse_attention(q, k, v, LAYOUTS[system])


def seconds(system: str, given: list[Tensor]) -> tuple[float, float]:
    """Return the seconds of one forward and of one backward."""
    begun = time.perf_counter()
    y = attention_of(system)(*given[:3])
    between = time.perf_counter()
    torch.autograd.grad(y, given[:3], given[3])
    return between - begun, time.perf_counter() - between


def peak_bytes(system: str, length: int) -> int | None:
    """Return the memory that one forward and backward add to a new process, inputs included; None if it died."""
    command = [sys.executable, "-m", "benchmarks.sparse_cases", system, str(length)]
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    return int(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None


def _peak(system: str, length: int) -> int:
    seconds(system, inputs(1024))  # what is loaded and made once
    before = process_bytes("VmRSS")
    seconds(system, inputs(length))
    return process_bytes("VmHWM") - before


def density_of(system: str, length: int) -> Any:
    """Return the density of a layout; 1 for dense attention."""
    return LAYOUTS[system].density(HEADS, length) if system in LAYOUTS else 1.0


if __name__ == "__main__":
    print(json.dumps(_peak(sys.argv[1], int(sys.argv[2]))))

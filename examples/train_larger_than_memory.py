"""Trains a byte-level GPT whose parameters, gradients and optimizer state lie on disk, and says what memory it took.

python -m examples.train_larger_than_memory --folder /scratch                            400 million parameters
python -m examples.train_larger_than_memory --folder /scratch --width 128 --layers 2     a small one
torchrun --nproc-per-node 2 -m examples.train_larger_than_memory --folder /scratch      each rank with its own files

The disk takes 16 bytes a parameter: the parameter, its gradient, and two numbers of AdamW's.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dsgraph
from dsgraph.optim.disk_optimizer import DiskOptimizer
from examples import ranks
from examples.gpt import GPT, GPTConfig
from examples.ranks import Place
from examples.text import standard_library


def build(width: int, layers: int, folder: str | None) -> GPT:
    """Return a model that never is in memory: its parameters go to disk as they are initialised, one module at a time.

    Without a folder, they stay in memory.
    """
    with torch.device("meta"):
        model = GPT(GPTConfig(width=width, heads=max(1, width // 64), layers=layers))
    for block in model.blocks:  # the backward computes a block's inside again
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    offload = None if folder is None else {"optimizer": "disk", "parameters": "disk", "folder": folder}
    dsgraph.partition(model, stage=3, offload=offload)
    return dsgraph.materialize(model, "cpu", progress=_bar)


def _bar(done: int, count: int) -> None:
    """A bar of the parameters that are initialised; where nobody sees it grow, its last state."""
    if sys.stderr.isatty() or done == count:
        full = 40 * done // count
        bar = f"\rinitialising [{'#' * full:40}] {done / 1e6:.1f} of {count / 1e6:.1f} million"
        print(bar, end="\n" if done == count else "", file=sys.stderr, flush=True)


def train(place: Place, wanted: argparse.Namespace) -> None:
    started, before = time.perf_counter(), place.peak_mb()
    torch.manual_seed(0)
    model: nn.Module = build(wanted.width, wanted.layers, wanted.folder)
    count = sum(param.numel() for param in model.parameters())
    place.say(f"{count / 1e6:.1f} million parameters on disk after {time.perf_counter() - started:.1f} s")
    place.say(f"memory to load them {place.peak_mb() - before:.0f} MB")
    optimizer = dsgraph.offload_optimizer(torch.optim.AdamW(model.parameters(), lr=wanted.lr), model)
    assert isinstance(optimizer, DiskOptimizer)
    compiled = torch.compile(
        model, backend="dsgraph", options={"codegen": wanted.codegen, "activation_offload": "disk"}
    )
    text = standard_library()
    for step in range(wanted.steps):
        batch = {"size": wanted.batch, "time": wanted.time, "seed": 0, "rank": place.rank, "world": place.world}
        tokens, targets = text.batch(step, **batch)
        begun = time.perf_counter()
        loss = compiled(tokens, targets)
        with optimizer.beside_backward():  # updates parameters as their gradients arrive
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        place.say(f"step {step + 1}  loss {place.mean(loss):.4f}  {time.perf_counter() - begun:.2f} s")
        if step == 0:
            place.say(f"first step {time.perf_counter() - started:.1f} s after the start")
    grown = place.peak_mb() - before
    states = 16 * count / place.world / 1e6
    place.say(f"states {states:.0f} MB a rank, memory {grown:.0f} MB: {states / grown:.1f} times as much")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="on a disk with room for 16 bytes a parameter")
    parser.add_argument("--width", type=int, default=1024, help="features of a token")
    parser.add_argument("--layers", type=int, default=32, help="transformer layers")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=8, help="windows a step, over all ranks")
    parser.add_argument("--time", type=int, default=256, help="bytes a window")
    parser.add_argument("--lr", type=float, default=3e-5, help="learning rate")
    parser.add_argument(
        "--codegen", default="eager", choices=("eager", "inductor"), help="see docs/reference/options.md"
    )
    wanted = parser.parse_args()
    train(Place.join(alone=not ranks.started_by_torchrun()), wanted)


if __name__ == "__main__":
    main()

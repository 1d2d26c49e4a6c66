"""Trains the byte-level GPT on 8 ranks, 2 x 2 x 2, and in one process; prints the losses side by side.

python -m examples.train_3d                                 data 2 x tensor 2 x pipeline 2, ZeRO stage 1
python -m examples.train_3d --dp 1 --tp 4 --pp 2 --zero 0   another layout; the product is the number of ranks
torchrun --nproc-per-node 8 -m examples.train_3d            the same as the first

The first rank trains the whole model besides, with the batches of all. It runs on GPUs (NCCL) when there is one for
each rank, on the CPU (gloo) otherwise.
"""

from __future__ import annotations

import argparse
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn

import dsgraph
from examples import ranks
from examples.gpt import GPT, GPTConfig
from examples.ranks import Place
from examples.text import standard_library

ROWS = 2  # of a micro-batch of one data-parallel rank
MICRO_BATCHES = 4


def train(s: argparse.Namespace) -> None:
    place = Place.join(alone=False)
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=s.width, layers=s.layers, heads=4)).to(place.device)
    alone = Alone(deepcopy(model), s.lr) if place.rank == 0 else None
    text = standard_library()
    windows = ROWS * MICRO_BATCHES * s.dp
    engine, *_ = dsgraph.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": s.lr}},
            "zero_optimization": {"stage": s.zero},
            "parallel": {"dp": s.dp, "tp": s.tp, "pp": s.pp},
            "dsgraph": {"codegen": "eager"},
        },
        example=text.batch(0, size=ROWS, time=s.time, seed=0, rank=0, world=1),
    )
    copies = engine.module.data_parallel
    place.say(f"data {s.dp} x tensor {s.tp} x pipeline {s.pp}, ZeRO stage {s.zero} ({place.device.type})")
    place.say("step  divided    alone")
    for step in range(s.steps):
        tokens, targets = (
            x.to(place.device) for x in text.batch(step, size=windows, time=s.time, seed=0, rank=0, world=1)
        )
        mine = slice(copies.rank(), None, copies.size()) if copies is not None else slice(None)
        micro = zip(tokens[mine].split(ROWS), targets[mine].split(ROWS), strict=True)
        loss = engine.train_batch(micro)
        if alone is not None:
            expected = alone.step(tokens, targets)
            if (step + 1) % s.log_every == 0:
                place.say(f"{step + 1:4}  {loss:7.4f}  {expected:7.4f}")
    dist.barrier()
    dist.destroy_process_group()


class Alone:
    """The same training in one process."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self._model, self._optimizer = model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:  # both [batch, time] int64
        loss = self._model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="train_3d", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, default, what in (
        ("dp", 2, "ranks that take parts of a batch"),
        ("tp", 2, "ranks that share every layer"),
        ("pp", 2, "ranks that have some of the layers each"),
        ("zero", 1, "ZeRO stage over the dp ranks"),
        ("steps", 40, "optimizer steps"),
        ("log-every", 4, "steps between lines"),
        ("width", 64, "features of a token"),
        ("layers", 4, "transformer layers"),
        ("time", 64, "bytes a window"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 3e-3)")
    settings = parser.parse_args()
    if ranks.started_by_torchrun():
        train(settings)
    else:
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in vars(settings).items()]
        ranks.start("examples.train_3d", arguments, count=settings.dp * settings.tp * settings.pp)


if __name__ == "__main__":
    main()

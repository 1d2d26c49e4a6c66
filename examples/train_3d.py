"""Trains the byte-level GPT on 8 ranks, 2 x 2 x 2, and in one process; prints the losses side by side.

python -m examples.train_3d                                 data 2 x tensor 2 x pipeline 2, ZeRO stage 1, bfloat16
python -m examples.train_3d --dp 1 --tp 4 --pp 2 --zero 0   another layout; the product is the number of ranks
python -m examples.train_3d --memory-limit 4MB              bounds the memory of a step on each rank
python -m examples.train_3d --save out                      saves a checkpoint at the end
python -m examples.train_3d --resume out --dp 4 --tp 1      goes on from it, in any layout
torchrun --nproc-per-node 8 -m examples.train_3d            the same as the first

The configuration is `train_3d.json`, or the file of `--config`. The first rank trains the whole model besides, with the
batches of all. It runs on GPUs (NCCL) when there is one for each rank, on the CPU (gloo) otherwise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import dsgraph
from examples import ranks
from examples.gpt import GPT, GPTConfig
from examples.ranks import Place
from examples.text import standard_library

EVAL_STEPS = 4


def train(s: argparse.Namespace) -> None:
    place = Place.join(alone=False)
    config = configuration(s)
    layout, rows, count = (
        config["parallel"],
        config["train_micro_batch_size_per_gpu"],
        config["gradient_accumulation_steps"],
    )
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=s.width, layers=s.layers, heads=4)).to(place.device)
    kind = "bfloat16" if config.get("bf16", {}).get("enabled") else "float32"
    lr = config["optimizer"]["params"]["lr"]
    is_compared = place.rank == 0 and s.resume is None
    alone = Alone(deepcopy(model), lr, getattr(torch, kind)) if is_compared else None
    text = standard_library()
    windows = rows * count * layout["dp"]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = text.batch(step, size=windows, time=s.time, seed=0, rank=0, world=1)
        return x.to(place.device), y.to(place.device)

    def held_out(step: int) -> tuple[Tensor, Tensor]:
        x, y = text.held_out_batch(step, EVAL_STEPS, size=windows, time=s.time, rank=0, world=1)
        return x.to(place.device), y.to(place.device)

    engine, *_ = dsgraph.initialize(model=model, config=config, example=tuple(x[:rows] for x in batch(0)))
    first = 0
    if s.resume is not None:
        engine.load_checkpoint(s.resume)
        first = engine.global_steps
    mine = slice(engine.dp_rank, None, engine.dp_world_size)

    def micro_batches(tokens: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(tokens[mine].split(rows), targets[mine].split(rows), strict=True)

    place.say(
        f"data {layout['dp']} x tensor {layout['tp']} x pipeline {layout['pp']}, "
        f"ZeRO stage {config['zero_optimization']['stage']}, {kind} ({place.device.type})"
    )
    place.say("step  divided    alone")
    for step in range(first, first + s.steps):
        both = batch(step)
        loss = engine.train_batch(micro_batches(*both))
        expected = alone.step(*both, parts=layout["dp"] * count) if alone is not None else float("nan")
        if (step + 1) % s.log_every == 0:
            place.say(f"{step + 1:4}  {loss:7.4f}  {expected:7.4f}")
    for stage in engine.module.report.memory if layout["pp"] > 1 else ():  # of the first rank, with a memory_limit
        place.say(f"stage {stage.stage}: a step takes {stage.peak:,} bytes of {stage.limit:,}")
    losses = [engine.eval_batch(micro_batches(*held_out(step))) for step in range(EVAL_STEPS)]
    place.say(f"held-out loss {float(sum(losses)) / EVAL_STEPS:.3f}")
    if s.save is not None:
        engine.save_checkpoint(s.save)
        place.say(f"checkpoint of step {engine.global_steps} in {s.save}")
    engine.close()
    dist.barrier()
    dist.destroy_process_group()


def configuration(s: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of the file, with what the command line says."""
    config: dict[str, Any] = json.loads(Path(s.config).read_text())
    config["parallel"] |= {name: getattr(s, name) for name in ("dp", "tp", "pp") if getattr(s, name) is not None}
    if s.zero is not None:
        config["zero_optimization"] = {**config["zero_optimization"], "stage": s.zero}
    if s.memory_limit is not None:
        config["dsgraph"] = {**config["dsgraph"], "memory_limit": s.memory_limit}
    return config


class Alone:
    """The same training in one process: float32 parameters, and a forward in `dtype`."""

    def __init__(self, model: nn.Module, lr: float, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def step(self, tokens: Tensor, targets: Tensor, *, parts: int) -> float:  # both [batch, time] int64
        total = 0.0
        low = {name: param.to(self._dtype) for name, param in self._model.named_parameters()}
        for rows, wanted in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
            loss = functional_call(self._model, low, (rows, wanted)).float() / parts
            loss.backward(retain_graph=True)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="train_3d", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", default=str(Path(__file__).with_suffix(".json")), help="the JSON configuration")
    for name, what in (
        ("dp", "ranks that take parts of a batch"),
        ("tp", "ranks that share every layer"),
        ("pp", "ranks that have some of the layers each"),
        ("zero", "ZeRO stage over the dp ranks"),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: that of the configuration)")
    for name, default, what in (
        ("steps", 40, "optimizer steps"),
        ("log-every", 4, "steps between lines"),
        ("width", 64, "features of a token"),
        ("layers", 4, "transformer layers"),
        ("time", 64, "bytes a window"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    for name, what in (
        ("save", "folder in which to save a checkpoint"),
        ("resume", "folder of a checkpoint to go on from"),
        ("memory-limit", "most memory of a step on each rank, such as 4MB"),
    ):
        parser.add_argument(f"--{name}", help=what)
    settings = parser.parse_args()
    if ranks.started_by_torchrun():
        train(settings)
    else:
        layout = configuration(settings)["parallel"]
        given = {name: value for name, value in vars(settings).items() if value is not None}
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        ranks.start("examples.train_3d", arguments, count=layout["dp"] * layout["tp"] * layout["pp"])


if __name__ == "__main__":
    main()

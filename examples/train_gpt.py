"""Trains a small GPT on the bytes of Python's standard library, with ZeRO by dsgraph; `make train` runs it.

python -m examples.train_gpt --nproc 2               starts two ranks by itself
torchrun --nproc-per-node 2 -m examples.train_gpt    the same
python -m examples.train_gpt --resume                goes on from the latest checkpoint, on any number of ranks
python -m examples.train_gpt --single                one process without dsgraph, for comparison

It runs on GPUs (NCCL) when there is one for each rank, on the CPU (gloo) otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import sys
import sysconfig
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dsgraph
from examples import checkpoint, ranks
from examples.gpt import GPT, GPTConfig
from examples.ranks import Place, refuse
from examples.text import LEAST_HELD_OUT, Text, standard_library


def option(default: Any, text: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """All that can be set, each as `--name` on the command line."""

    nproc: int = option(2, "ranks to start on this machine")
    single: bool = option(False, "one process with plain torch.compile, without dsgraph")
    stage: int = option(3, "ZeRO stage", (0, 1, 2, 3))
    codegen: str = option("inductor", "inductor compiles kernels, eager starts sooner", ("inductor", "eager"))

    model: str = option("gpt", "gpt is examples/gpt.py, llama comes from transformers", ("gpt", "llama"))
    width: int = option(128, "features of a token")
    layers: int = option(3, "transformer layers")
    heads: int = option(4, "attention heads")

    steps: int = option(600, "optimizer steps, those before a resumed checkpoint included")
    batch: int = option(12, "windows a step, over all ranks")
    time: int = option(256, "bytes a window")
    lr: float = option(3e-3, "highest learning rate")
    warmup: int = option(20, "steps until it is reached")
    clip: float = option(1.0, "highest norm of the gradient")
    seed: int = option(0, "of the parameters, the order of the data and the sample")

    log_every: int = option(50, "steps between lines of progress, where there is no terminal to show each in")
    eval_every: int = option(200, "steps between looks at the held-out loss")
    eval_batches: int = option(20, "batches of held-out text")
    sample: int = option(200, "bytes of text to generate at the end")
    checkpoint: str = option("checkpoints/train_gpt", "folder of checkpoints; a new run replaces what is in it")
    save_every: int = option(200, "steps between checkpoints; the last step is always saved")
    resume: bool = option(False, "go on from the latest checkpoint")

    @property
    def sizes(self) -> dict[str, Any]:
        """The settings that a run must share with a checkpoint that it resumes from."""
        return {name: getattr(self, name) for name in ("model", "width", "layers", "heads")}


def train(s: Settings) -> None:
    place = Place.join(alone=s.single)
    text = standard_library()
    torch.manual_seed(s.seed)
    model = build_model(s).to(place.device)
    size = f"{s.model}: {sum(param.numel() for param in model.parameters()) / 1e6:.2f} M parameters"

    if s.single:
        compiled = torch.compile(model, backend="inductor" if s.codegen == "inductor" else "aot_eager")
    else:
        model = dsgraph.partition(model, stage=s.stage)
        compiled = torch.compile(model, backend="dsgraph", options={"codegen": s.codegen})
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    folder, done, loss = Path(s.checkpoint), 0, math.nan
    if s.resume and (latest := checkpoint.read_latest(folder)) is not None:
        checkpoint.load(folder, latest, model, optimizer)
        done, loss = latest.step, latest.loss
    place.say(f"{size}, {describe(s, place, text, done)}")

    meter = Meter(s, place)
    for step in range(done, s.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, s)
        batch = text.batch(step, size=s.batch, time=s.time, seed=s.seed, rank=place.rank, world=place.world)
        tokens, targets = (x.to(place.device) for x in batch)  # [batch / world, time] int64
        meter.start()
        step_loss = compiled(tokens, targets)
        step_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss = place.mean(step_loss)
        meter.stop(step + 1, loss)
        if (step + 1) % s.eval_every == 0 and step + 1 < s.steps:
            place.say(f"step {step + 1}: held-out loss {held_out_loss(model, text, s, place):.3f}")
        if (step + 1) % s.save_every == 0 or step + 1 == s.steps:
            checkpoint.save(folder, model, optimizer, step=step + 1, loss=loss, sizes=s.sizes)

    val_loss = held_out_loss(model, text, s, place)
    place.say(f"\n{generate(model, b'def ', s, place)}\n")
    place.say(
        f"final: loss={loss:.3f} val_loss={val_loss:.3f} tokens_per_s={meter.tokens_per_s:.0f} "
        f"peak_mb={place.highest(place.peak_mb()):.0f}"
    )
    dist.destroy_process_group()


def describe(s: Settings, place: Place, text: Text, done: int) -> str:
    how = "one process" if s.single else f"ZeRO-{s.stage} on {place.world} ranks"
    sizes = f"{len(text.train) / 1e6:.1f} MB of text, {len(text.held_out) / 1e6:.1f} MB held out"
    compiling = "; compiling takes the first step" if s.codegen == "inductor" else ""
    return f"{how} ({place.device.type}); {sizes}; step {done} of {s.steps}{compiling}"


def build_model(s: Settings) -> nn.Module:
    config = GPTConfig(width=s.width, layers=s.layers, heads=s.heads)
    if s.model == "gpt":
        return GPT(config)
    from examples.llama import Llama  # needs transformers, which nothing else here does

    return Llama(config, longest=s.time)


def learning_rate(step: int, s: Settings) -> float:
    """Return a straight line up to `lr`, then half a cosine down to a tenth of it."""
    if step < s.warmup:
        return s.lr * (step + 1) / s.warmup
    way = (step - s.warmup) / max(1, s.steps - s.warmup)
    return s.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * way)))


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Text, s: Settings, place: Place) -> float:
    """Mean loss, in nats a byte, over fixed windows of the held-out text, which the ranks share out."""
    total = torch.zeros((), device=place.device)
    for index in range(s.eval_batches):
        batch = text.held_out_batch(
            index, s.eval_batches, size=s.batch, time=s.time, rank=place.rank, world=place.world
        )
        total += model(*(x.to(place.device) for x in batch))
    return place.mean(total / s.eval_batches)


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, s: Settings, place: Place) -> str:
    """Go on from `prompt` at temperature 0.8. All ranks call it: forward fetches the shards of all of them."""
    generator = torch.Generator().manual_seed(s.seed)  # the same on every rank, so that all draw the same bytes
    tokens = torch.tensor([list(prompt)], device=place.device)  # [1, time] int64
    for _ in range(s.sample):
        logits = model.logits(tokens[:, -s.time :])[0, -1]  # [vocab]
        chosen = torch.multinomial((logits.float() / 0.8).softmax(-1).cpu(), 1, generator=generator)  # [1]
        tokens = torch.cat([tokens, chosen.to(place.device)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode("ascii", errors="backslashreplace")


class Meter:
    """Speed, loss and memory: a line in a terminal, a line every few steps elsewhere."""

    def __init__(self, s: Settings, place: Place) -> None:
        self.tokens_per_s = 0.0  # over all ranks; without the first step, which compiles
        self._settings, self._place = s, place
        self._steps, self._seconds = -1, 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self, step: int, loss: float) -> None:
        s, now = self._settings, time.perf_counter()
        self._steps += 1
        if self._steps > 0:
            self._seconds += now - self._started
            self.tokens_per_s = self._steps * s.batch * s.time / self._seconds
        figures = f"loss {loss:.3f}, {self.tokens_per_s:,.0f} tokens/s, {self._place.peak_mb():.0f} MB"
        line = f"step {step}/{s.steps}: {figures}"
        self._place.show(line)
        if not self._place.is_watched and (step % s.log_every == 0 or step == s.steps):
            self._place.say(line)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        refuse(f"{self.prog}: {message}")


def read_settings(arguments: list[str]) -> Settings:
    """Return settings from the command line; a wrong one ends the process with one line."""
    parser = Parser(
        prog="train_gpt", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for item in fields(Settings):
        name, text = to_option(item.name), item.metadata["help"]
        if item.default is False:
            parser.add_argument(name, action="store_true", help=text)
        else:
            parser.add_argument(
                name,
                type=type(item.default),
                default=item.default,
                choices=item.metadata["choices"],
                help=f"{text} (default: {item.default})",
            )
    settings = Settings(**vars(parser.parse_args(arguments)))
    problem = what_is_wrong(settings)
    if problem:
        parser.error(problem)
    return settings


def what_is_wrong(s: Settings) -> str | None:
    """Return why a run with these settings could not work; None when it can."""
    for item in fields(s):
        value, may_be_zero = getattr(s, item.name), item.name in ("stage", "seed", "sample", "warmup")
        if type(value) in (int, float) and not (0 < value < math.inf or (value == 0 and may_be_zero)):
            return (
                f"{to_option(item.name)} is {value}; it takes a number {'of 0 or more' if may_be_zero else 'above 0'}"
            )
    if s.time >= LEAST_HELD_OUT:
        return f"--time is {s.time}; it takes less than {LEAST_HELD_OUT}"
    world = 1 if s.single else int(os.environ.get("WORLD_SIZE", s.nproc))
    if s.batch % world:
        return f"--batch is {s.batch}, which {world} ranks cannot share evenly; take a multiple of {world}"
    if s.width % (2 * s.heads):
        return f"--width is {s.width}; it takes a multiple of {2 * s.heads}, two for each of the {s.heads} heads"
    if s.model == "llama" and importlib.util.find_spec("transformers") is None:
        return "--model llama needs transformers, which is not installed: pip install 'transformers>=5,<6'"
    if s.codegen == "inductor" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        return "--codegen inductor needs a C++ compiler and found none: install g++, or add --codegen eager"
    if s.codegen == "inductor" and not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "--codegen inductor needs Python.h (Debian: python3-dev): install it, or add --codegen eager"
    folder = Path(s.checkpoint)
    if s.resume:
        latest = checkpoint.read_latest(folder)
        if latest is None:
            return f"--resume found no checkpoint in {s.checkpoint}; run once without it"
        if latest.sizes != s.sizes:
            return f"the checkpoint in {s.checkpoint} is of {_listed(latest.sizes)}, this run of {_listed(s.sizes)}"
        if latest.step >= s.steps:
            return f"the checkpoint in {s.checkpoint} is of step {latest.step}, and --steps is {s.steps}: nothing to do"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--checkpoint is {s.checkpoint}, which cannot be made: {error.strerror}"
    if not os.access(folder, os.W_OK):
        return f"--checkpoint is {s.checkpoint}, which cannot be written to"
    return None


def _listed(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


def to_arguments(s: Settings) -> list[str]:
    """Return the command line of one rank. Without `nproc`, which torchrun would take for an option of its own."""
    arguments = []
    for item in fields(s):
        value = getattr(s, item.name)
        if value != item.default and item.name != "nproc":
            arguments += [to_option(item.name)] if value is True else [to_option(item.name), str(value)]
    return arguments


def to_option(name: str) -> str:
    return "--" + name.replace("_", "-")


def main() -> None:
    settings = read_settings(sys.argv[1:])
    if settings.single or ranks.started_by_torchrun():
        train(settings)
    else:
        ranks.start("examples.train_gpt", to_arguments(settings), count=settings.nproc)


if __name__ == "__main__":
    main()

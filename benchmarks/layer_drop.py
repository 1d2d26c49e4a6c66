"""Progressive layer dropping beside training with all layers: the part `layers` of `benchmarks.compressed`.

A byte-level GPT of 12 blocks on the text of examples/text.py, one rank, AdamW, codegen "inductor". The two engines take
turns. Columns:
    system      `all`: every block runs; `dropped`: `progressive_layer_drop` with theta 0.5
    compile_s   seconds of the first two steps
    early_s     seconds a step, mean over the first tenth of the steps after those
    late_s      the same over the last tenth, where theta has come down
    mean_s      the same over all of them
    loss        held-out, nats a byte, with all blocks
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import dsgraph
from benchmarks.report import Check, Row
from examples.gpt import GPT, GPTConfig
from examples.text import Text, standard_library

SYSTEMS = ("all", "dropped")
_SIZE, _TIME = 8, 128  # sequences of a step, tokens of each
_WARM = 2
_HELD_OUT = 16


def measure(*, quick: bool) -> list[Row]:
    """Return one row a system."""
    layers, width, steps = (3, 32, 12) if quick else (12, 192, 400)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        text = standard_library()
        engines = {system: _engine(system, layers=layers, width=width, steps=steps) for system in SYSTEMS}
        seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for step in range(steps + _WARM):
            for system in SYSTEMS:
                seconds[system].append(_step(engines[system], text, step))
        return [_row(system, seconds[system], _held_out(engines[system], text)) for system in SYSTEMS]
    finally:
        dist.destroy_process_group()


def _engine(system: str, *, layers: int, width: int, steps: int) -> dsgraph.Engine:
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=width, layers=layers))
    config: dict[str, Any] = {
        "train_batch_size": _SIZE,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": steps // 10}},
    }
    if system == "dropped":  # in half of the steps, theta has come nine tenths of its way
        config["progressive_layer_drop"] = {"enabled": True, "theta": 0.5, "gamma": 4.6 / steps}
    engine: dsgraph.Engine = dsgraph.initialize(model=model, config=config)[0]
    return engine


def _step(engine: dsgraph.Engine, text: Text, step: int) -> float:
    tokens, targets = text.batch(step, size=_SIZE, time=_TIME, seed=0, rank=0, world=1)
    start = time.perf_counter()
    engine.backward(engine(tokens, targets))
    engine.step()
    return time.perf_counter() - start


def _held_out(engine: dsgraph.Engine, text: Text) -> float:
    engine.eval()
    with torch.no_grad():
        batches = [
            text.held_out_batch(at, _HELD_OUT, size=_SIZE, time=_TIME, rank=0, world=1) for at in range(_HELD_OUT)
        ]
        return statistics.mean(float(engine(*batch)) for batch in batches)


def _row(system: str, seconds: Sequence[float], loss: float) -> Row:
    warm = seconds[_WARM:]
    tenth = max(1, len(warm) // 10)
    return {
        "system": system,
        "compile_s": sum(seconds[:_WARM]),
        "early_s": statistics.mean(warm[:tenth]),
        "late_s": statistics.mean(warm[-tenth:]),
        "mean_s": statistics.mean(warm),
        "loss": loss,
    }


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return layers dropped against all layers."""
    every, dropped = rows
    return [
        Check(
            "layer dropping: time per sample, theta down, over all layers",
            dropped["late_s"] / every["late_s"],
            0.8,
            "lower",
        ),
        Check(
            "layer dropping: time per sample, all steps, over all layers",
            dropped["mean_s"] / every["mean_s"],
            0.8,
            "lower",
        ),
    ]

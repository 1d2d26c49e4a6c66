"""Trains a model by the engine on this rank, and its twin in one process, and compares them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph
from tests.distributed.training import full
from tests.models import build, tokens

CASE = "small"


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "dsgraph": {"codegen": "eager"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        **more,
    }


def batches(rank: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
    number = first
    while True:
        yield tokens(number, rank)
        number += 1


def alone_step(model: nn.Module, data: list[Iterator[tuple[Tensor, ...]]], micro_batches: int, clip: float) -> float:
    """Adds up one step's gradients over everybody's micro-batches; the norm before they are clipped."""
    count = len(data) * micro_batches
    for one in data:
        for _ in range(micro_batches):
            (model(*next(one)) / count).backward()
    return float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")))


def check_parameters(engine: dsgraph.Engine, alone: nn.Module, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for (name, mine), theirs in zip(engine.module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            full(mine.detach()), theirs.detach(), rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def compare(stage: int, micro_batches: int, settings: dict[str, Any], make_alone: Any, steps: int = 4) -> None:
    """An engine's parameters and gradient norms after each step against a plain loop in one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = config(stage, gradient_accumulation_steps=micro_batches, **settings)
    engine, optimizer, _, _ = dsgraph.initialize(model=build(CASE), config=wanted)
    alone = build(CASE)
    alone_optimizer, alone_schedule = make_alone(alone)
    mine, everybody = batches(rank), [batches(other) for other in range(world)]
    clip = settings.get("gradient_clipping", 1.0)
    for _ in range(steps):
        assert engine.get_lr() == [group["lr"] for group in alone_optimizer.param_groups]
        engine.train_batch(mine)
        norm = alone_step(alone, everybody, micro_batches, clip)
        if clip:
            assert abs(engine.get_global_grad_norm() - norm) <= 1e-6 * max(norm, 1), "the norm of one process"
        alone_optimizer.step()
        alone_optimizer.zero_grad()
        if alone_schedule is not None:
            alone_schedule.step()
        check_parameters(engine, alone)
    assert engine.global_steps == steps and engine.optimizer is optimizer
    engine.close()

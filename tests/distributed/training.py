"""Trains a model under dsgraph on this rank, and its twin in this process alone, and compares them step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dsgraph

Batches = Callable[[int, int], tuple[Tensor, ...]]

RTOL, ATOL = 1e-5, 1e-6


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(
    build: Callable[[], nn.Module],
    batches: Batches,
    *,
    stage: int,
    mesh_shape: Sequence[int] | None = None,
    codegen: str | None = "eager",
    steps: int = 3,
    micro_batches: int = 1,
    keep_whole_below: int = 12,
    exact: bool = False,
    evaluate: bool = False,
    reduce_once: bool | None = None,
    blocks: Any = "auto",
    tp: int = 1,
    **options: Any,
) -> None:
    """Losses, gradients and parameters of `steps` steps under dsgraph against one process with everybody's batches.

    With `evaluate`, the losses without gradients as well. `blocks` is an argument of `partition`. `tp` neighbouring
    ranks share each parameter and get the same batches.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = None
    if mesh_shape is not None:
        mesh = dist.init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=("replicate", "shard"))
    layout = None
    if tp > 1:
        layout = dist.init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
        mesh, world, rank = layout["dp"], world // tp, layout.get_local_rank("dp")
    torch.manual_seed(0)
    alone = build()
    torch.manual_seed(rank)  # the first rank's values count
    sharded = build()
    names = [name for name, _ in sharded.named_parameters()]
    if layout is not None:
        dsgraph.tensor_parallel(sharded, layout["tp"], example_inputs=batches(0, 0))
    partitioned = dsgraph.partition(sharded, mesh, stage=stage, keep_whole_below=keep_whole_below, blocks=blocks)
    assert [name for name, _ in partitioned.named_parameters()] == names
    runs = (
        partitioned
        if codegen is None
        else torch.compile(partitioned, backend="dsgraph", options={"codegen": codegen, **options})
    )
    with torch.no_grad():
        for mine, theirs in zip(partitioned.parameters(), alone.parameters(), strict=True):
            theirs.copy_(full(mine))
    if rank == 0:
        torch.manual_seed(0)
        first = build()
        for ours, expected in zip(alone.parameters(), first.parameters(), strict=True):
            assert torch.equal(ours, expected)

    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True)  # noqa: E731
    optimizer, alone_optimizer = make(partitioned.parameters()), make(alone.parameters())
    check = _check_exactly if exact else _check_closely
    for step in range(steps):
        waiting = partial(dsgraph.accumulate, partitioned, reduce_once=reduce_once)
        loss = _step(runs, batches, step, rank, micro_batches, waiting)
        expected = sum(_step(alone, batches, step, other, micro_batches, nullcontext) for other in range(world)) / world
        for param in alone.parameters():
            if param.grad is not None:
                param.grad /= world
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / (world * tp), expected, rtol=RTOL, atol=ATOL)
        for (name, mine), theirs in zip(partitioned.named_parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), f"step {step}: gradient of {name}"
            if mine.grad is not None:
                assert mine.grad.placements == mine.placements
                check(full(mine.grad), theirs.grad, f"step {step}: gradient of {name}")
        optimizer.step()
        alone_optimizer.step()
        optimizer.zero_grad()
        alone_optimizer.zero_grad()
        for (name, mine), theirs in zip(partitioned.named_parameters(), alone.named_parameters(), strict=True):
            check(full(mine), theirs[1], f"step {step}: parameter {name}")
    if evaluate:
        # Compiled, the second context would be one more compile of the same graph.
        contexts = [torch.no_grad, torch.inference_mode] if codegen is None else [torch.no_grad]
        _compare_evaluation(runs, alone, batches(steps, rank), contexts)


def _step(
    model: Any,
    batches: Batches,
    step: int,
    rank: int,
    micro_batches: int,
    accumulating: Callable[[], AbstractContextManager[None]],
) -> Tensor:
    total = torch.zeros(())
    for micro in range(micro_batches):
        torch.manual_seed(10_000 + 100 * step + 10 * micro + rank)  # for dropout
        with nullcontext() if micro == micro_batches - 1 else accumulating():
            loss = model(*batches(step * micro_batches + micro, rank)) / micro_batches
            loss.backward()
        total += loss.detach()
    return total


def _compare_evaluation(model: Any, alone: nn.Module, batch: tuple[Tensor, ...], contexts: list[Any]) -> None:
    alone.eval()
    model.eval()
    for context in contexts:
        with context():
            torch.testing.assert_close(model(*batch), alone(*batch), rtol=RTOL, atol=ATOL)


def _check_exactly(mine: Tensor, theirs: Tensor, what: str) -> None:
    assert torch.equal(mine, theirs), f"{what}: differs by {(mine - theirs).abs().max()}"


def _check_closely(mine: Tensor, theirs: Tensor, what: str) -> None:
    torch.testing.assert_close(mine, theirs, rtol=RTOL, atol=ATOL, msg=lambda text: f"{what}: {text}")

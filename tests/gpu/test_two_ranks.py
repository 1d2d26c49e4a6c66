"""Two gloo ranks that share one device: numbers of all stages against one process, with real communication."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dsgraph
from tests.gpu.device import ON_CUDA, error_of, the_device
from tests.gpu.models import build, full

pytestmark = [pytest.mark.gpu, pytest.mark.distributed, pytest.mark.inductor, pytest.mark.slow]

STEPS, ROWS, WORLD = 3, 2, 2
WORKERS = 3
"""So many workers of the tests start ranks, once each, and call them again and again."""
CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    **{f"stage {stage}, eager": {"stage": stage, "codegen": "eager"} for stage in (0, 1, 2, 3)},
    **{f"stage {stage}, uncompiled": {"stage": stage, "codegen": None} for stage in (1, 3)},
    "stage 1, micro-batches": {"stage": 1, "micro": 2},
    "stage 2, micro-batches": {"stage": 2, "micro": 2},
    "stage 3, micro-batches": {"stage": 3, "micro": 2},
    "stage 3, bfloat16": {"stage": 3, "param_dtype": torch.bfloat16},
    "stage 1, bfloat16": {"stage": 1, "param_dtype": torch.bfloat16},
    "stage 3, host": {"stage": 3, "options": {"activation_offload": "host"}},
    "stage 3, memory limit": {"stage": 3, "options": {"memory_limit": "2GiB"}},
    "stage 3, uneven shards": {"stage": 3, "sizes": {"vocab": 513, "width": 132, "heads": 3}},
    "stage 3, blocks": {"stage": 3, "blocks": "auto"},
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.xdist_group(f"ranks{n % WORKERS}")) for n, case in enumerate(CASES)],
)
def test_trains_as_one_process(case, two_ranks, record):
    losses, expected, errors = two_ranks.run(compare, **CASES[case])[0]
    record(losses=losses, expected=expected, worst=errors[0])
    exact = "param_dtype" not in CASES[case]
    assert errors[0][0] < (5e-4 if exact else 5e-2), errors[:5]
    for mine, theirs in zip(losses, expected, strict=True):
        assert abs(mine - theirs) < (1e-4 if exact else 3e-2), (losses, expected)


def compare(
    *,
    stage: int,
    codegen: str | None = "inductor",
    micro: int = 1,
    options: dict[str, Any] | None = None,
    sizes: dict[str, int] | None = None,
    **how: Any,
) -> tuple[list[float], list[float], list[tuple[float, str]]]:
    """On each rank: losses of all ranks, those of one process, and the error of each parameter, the largest first."""
    device = the_device()
    data = _data(device)
    plain = build(**(sizes or {})).to(device)
    expected = _losses(plain, plain, [[data[step].flatten(0, 1)] for step in range(STEPS)])
    mesh = init_device_mesh(device.type, (WORLD,), mesh_dim_names=("shard",))
    model = dsgraph.partition(build(**(sizes or {})).to(device), mesh, stage=stage, **how)
    own = data[:, dist.get_rank()]
    batches = [list(own[step].chunk(micro)) for step in range(STEPS)]
    run: Any = model
    if codegen is not None:
        run = torch.compile(model, backend="dsgraph", options={"codegen": codegen, **(options or {})})
    mine = torch.tensor(_losses(model, run, batches))
    dist.all_reduce(mine)
    errors = [
        (error_of(full(param), theirs), name)
        for (name, param), theirs in zip(model.named_parameters(), plain.parameters(), strict=True)
    ]
    return (mine / WORLD).tolist(), expected, sorted(errors, reverse=True)


def _data(device: torch.device) -> Tensor:
    """Tokens `[steps, ranks, rows, length]`."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 512, (STEPS, WORLD, ROWS, 65), generator=generator).to(device)


def _losses(model: nn.Module, run: Any, batches: list[list[Tensor]]) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for micro_batches in batches:
        optimizer.zero_grad()
        total = 0.0
        for number, tokens in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with nullcontext() if last else dsgraph.accumulate(model):
                loss = run(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) / len(micro_batches)
                loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.cuda
@pytest.mark.xdist_group("ranks0")
def test_nccl_refuses_two_ranks_on_one_device(two_ranks, record):
    """Were it otherwise, these tests would use NCCL."""
    answers = two_ranks.run(_try_nccl, limit_s=60)
    record(answers=answers)
    assert ON_CUDA


def _try_nccl() -> str:
    the_device()
    try:
        group = dist.new_group(backend="nccl")
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x, group=group)
        return f"sum {x[0].item()}"
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error)[:300]}"

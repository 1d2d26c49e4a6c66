"""One rank of eight that do not exist: real kernels and graphs, no communication; memory, host time and kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dsgraph
from dsgraph.partitioning.blocks.block_frames import ITS_OWN_FRAME
from tests.gpu.device import ON_CUDA, host_waits, synchronize
from tests.gpu.models import build

pytestmark = [pytest.mark.gpu, pytest.mark.inductor, pytest.mark.alone]

SMALL = {"vocab": 512, "width": 128, "heads": 4, "layers": 2}
LARGE = {"vocab": 16384, "width": 1024, "heads": 8, "layers": 4}
CASES: dict[str, dict[str, Any] | None] = {
    "stage 3": {"stage": 3, "param_dtype": torch.bfloat16},
    "stage 1": {"stage": 1, "param_dtype": torch.bfloat16},
    "stage 3, blocks captured once": {"stage": 3, "param_dtype": torch.bfloat16, "blocks": "auto"},
    "plain": None,
}


@pytest.fixture
def fake_ranks(device):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield 8
    dist.destroy_process_group()


def milliseconds(function: Callable[[], object], times: int = 5) -> dict[str, float]:
    """Medians until a call returns, and until the device is through."""
    returned, through = [], []
    for _ in range(times):
        synchronize()
        started = time.perf_counter()
        function()
        returned.append(time.perf_counter() - started)
        synchronize()
        through.append(time.perf_counter() - started)
    return {"host_ms": 1e3 * sorted(returned)[times // 2], "ms": 1e3 * sorted(through)[times // 2]}


def kernels_of(step: Callable[[], object]) -> dict[str, float]:
    """Kernels a step, and the share of the time between the first and the last in which one runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            step()
        synchronize()
    on_device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in on_device)
    busy, end = 0.0, 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return {"kernels": len(spans) / 2, "busy_share": busy / (end - spans[0][0])}


@pytest.mark.parametrize("case", CASES)
def test_figures(case, device, fake_ranks, record):
    sizes, how = LARGE if ON_CUDA else SMALL, CASES[case]
    tokens = torch.randint(0, sizes["vocab"], (2, 4, 1024 if ON_CUDA else 64), device=device)
    model = build(**sizes).to(device)
    started = time.perf_counter()
    if how is None:
        model = model.to(torch.bfloat16)
        compiled = torch.compile(model)
    else:
        model = dsgraph.partition(model, **how)
        compiled = torch.compile(model, backend="dsgraph")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        compiled(*tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    synchronize()
    record(first_step_s=time.perf_counter() - started, parameters=sum(p.numel() for p in model.parameters()))
    for _ in range(2):
        step()
    if ON_CUDA:
        torch.cuda.reset_peak_memory_stats()
    record(step=milliseconds(step))
    if ON_CUDA:
        record(peak_mb=torch.cuda.max_memory_allocated() / 2**20, reserved_mb=torch.cuda.memory_reserved() / 2**20)
        record(**kernels_of(step))
    record(host_waits=host_waits(step))
    if how is not None:
        report = dsgraph.report(model)
        record(memory=str(report.memory), fallbacks=[str(item) for item in report.fallbacks][:5])
        breaks = [each for each in report.graph_breaks if each.reason != ITS_OWN_FRAME]
        assert not breaks, breaks

"""Compiled models on one GPU, in a group of one rank, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dsgraph
from tests.gpu.device import ON_CUDA, error_of, host_waits, synchronize
from tests.gpu.models import batch, build, build_checkpointed, full, local, train

pytestmark = [pytest.mark.gpu, pytest.mark.inductor, pytest.mark.usefixtures("one_rank")]

KERNELS = ["rms_norm", "add_rms_norm", "rope", "linear_cross_entropy"]
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "stage 1, eager": (1, {"codegen": "eager"}),
    "stage 3, eager": (3, {"codegen": "eager"}),
    "host": (3, {"activation_offload": "host"}),
    "host, stage 1": (1, {"activation_offload": "host"}),
    "host, eager": (3, {"activation_offload": "host", "codegen": "eager"}),
    "disk": (3, {"activation_offload": "disk"}),
    "kernels": (3, {"kernels": KERNELS}),
    "kernels, eager": (3, {"kernels": KERNELS, "codegen": "eager"}),
    "kernels, host": (1, {"kernels": KERNELS, "activation_offload": "host"}),
}


def partitioned(device: torch.device, *, stage: int, model: nn.Module | None = None, **options: Any) -> nn.Module:
    return dsgraph.partition((model or build()).to(device), stage=stage, **options)


def peak_of(function: Any) -> int | None:
    """Bytes of the device's memory at most in a call; None on the CPU."""
    if not ON_CUDA:
        function()
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    function()
    synchronize()
    return torch.cuda.max_memory_allocated()


def assert_trains_as_plain(model: nn.Module, compiled: Any, device: torch.device, record: Any) -> None:
    """Losses and parameters of three steps are those of plain torch, then one more step records peak and waits."""
    data, plain = batch(device), build().to(device)
    expected, losses = train(plain, plain, data), train(model, compiled, data)
    worst = max(
        (error_of(full(mine), theirs), name)
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True)
    )
    record(losses=losses, expected=expected, parameter_error=worst)
    peak = peak_of(lambda: compiled(*data).backward())
    record(peak_mb=peak and peak / 2**20, host_waits=host_waits(lambda: compiled(*data).backward()))
    assert max(abs(mine - theirs) for mine, theirs in zip(losses, expected, strict=True)) < 2e-3
    assert worst[0] < 1e-3, worst
    breaks = dsgraph.report(model).graph_breaks
    assert not breaks, breaks


@pytest.mark.parametrize("case", CASES)
def test_trains_as_plain_torch(case, device, record):
    stage, options = CASES[case]
    model = partitioned(device, stage=stage)
    assert_trains_as_plain(model, torch.compile(model, backend="dsgraph", options=options), device, record)


@pytest.mark.parametrize("stage", [1, 3])
def test_with_cuda_graphs(stage, device, record):
    model = partitioned(device, stage=stage)
    compiled = torch.compile(model, backend="dsgraph", mode="reduce-overhead")
    assert_trains_as_plain(model, compiled, device, record)


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_blocks_that_are_captured_once(codegen, device, record):
    model = partitioned(device, stage=3, regions="auto")
    assert_trains_as_plain(model, torch.compile(model, backend="dsgraph", options={"codegen": codegen}), device, record)


def test_a_plain_step_does_not_wait_for_the_device(device, record):
    model, data = partitioned(device, stage=3), batch(device)
    compiled = torch.compile(model, backend="dsgraph")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        compiled(*data).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    waits = host_waits(step)
    record(host_waits=waits)
    assert waits == {}


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_dropout_in_checkpointed_blocks(codegen, device, record):
    """The derivative along a direction: right only if the backward draws what the forward drew."""
    model = partitioned(device, stage=3, model=build_checkpointed(dropout=0.3).double())
    compiled, data = torch.compile(model, backend="dsgraph", options={"codegen": codegen}), batch(device)
    torch.manual_seed(7)
    compiled(*data).backward()
    weight = dict(model.named_parameters())["blocks.1.up.weight"]
    direction, eps, losses = torch.randn_like(local(weight)), 1e-3, []
    for sign in (1, -1):
        _move(weight, sign * eps * direction)
        torch.manual_seed(7)
        losses.append(float(compiled(*data).detach()))
        _move(weight, -sign * eps * direction)
    numeric, found = (losses[0] - losses[1]) / (2 * eps), float((local(weight.grad) * direction).sum())
    record(numeric=numeric, backward=found)
    assert abs(numeric - found) < 1e-2 * max(1e-2, abs(numeric))


def _move(weight: torch.Tensor, by: torch.Tensor) -> None:
    with torch.no_grad():
        local(weight).add_(by)
        torch.autograd.graph.increment_version(weight)


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_many_steps_of_offload_with_poisoned_memory(codegen, device, record):
    """A copy that is read too late, or a buffer reused too early, gives NaN."""
    model, data = partitioned(device, stage=3), batch(device)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": codegen, "activation_offload": "host"})
    first: list[torch.Tensor] = []
    for step in range(12):
        model.zero_grad()
        compiled(*data).backward()
        grads = [local(param.grad).clone() for param in model.parameters()]
        junk = [torch.full((2**19,), float("nan"), device=device) for _ in range(16)]
        del junk
        first = first or grads
        found = max(error_of(mine, theirs) for mine, theirs in zip(grads, first, strict=True))
        assert found < 1e-4, f"step {step}: {found}"
    record(error=found)


def test_a_forward_that_is_thrown_away(device):
    model, data = partitioned(device, stage=1), batch(device)
    compiled = torch.compile(model, backend="dsgraph", options={"activation_offload": "host"})
    for _ in range(3):
        loss = compiled(*data)
        del loss
    compiled(*data).backward()
    plain = build().to(device)
    plain(*data).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert error_of(full(mine.grad), theirs.grad) < 1e-4


def _big(device: torch.device) -> tuple[dict[str, int], tuple[torch.Tensor, torch.Tensor]]:
    """A model whose activations are most of its memory."""
    return {"width": 256, "layers": 4}, batch(device, rows=8, length=256)


def _peak_of_training(device: torch.device, options: dict[str, Any]) -> tuple[Any, int | None, list[float]]:
    sizes, data = _big(device)
    model = partitioned(device, stage=3, model=build(**sizes))
    compiled = torch.compile(model, backend="dsgraph", options=options)
    losses = train(model, compiled, data, steps=2)
    model.zero_grad()
    before = torch.cuda.memory_allocated() if ON_CUDA else 0
    peak = peak_of(lambda: compiled(*data).backward())
    return dsgraph.report(model), None if peak is None else peak - before, losses


def test_a_memory_limit_is_kept(device, record):
    usual, free_peak, losses = _peak_of_training(device, {})
    torch._dynamo.reset()
    limit = 140 * 2**20
    report, peak, limited = _peak_of_training(device, {"memory_limit": limit})
    record(usual=str(usual.memory), limited=str(report.memory), free_peak=free_peak, peak=peak, limit=limit)
    record(losses=losses, limited_losses=limited)
    assert max(abs(a - b) for a, b in zip(losses, limited, strict=True)) < 2e-3


@pytest.mark.cuda
def test_offload_to_the_host_lowers_the_peak(device, record):
    _, free_peak, _ = _peak_of_training(device, {})
    torch._dynamo.reset()
    _, peak, _ = _peak_of_training(device, {"activation_offload": "host"})
    record(free_mb=free_peak / 2**20, offload_mb=peak / 2**20)
    assert peak < free_peak

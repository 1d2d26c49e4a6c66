"""The engine on one GPU: losses fall, checkpoints come back, and the host waits as rarely as it should."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import dsgraph
from tests.gpu.device import host_waits, synchronize
from tests.gpu.models import batch, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:delayed_update"),
]

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
BF16 = {**ADAM, "bf16": {"enabled": True}}
ON_HOST = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}


def _optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-3, **params}}}


CASES: dict[str, dict[str, Any]] = {
    "fp32": {**ADAM, "gradient_clipping": 0.0},
    "fp32, clipped": {**ADAM, "gradient_clipping": 1.0},
    "bf16, clipped": {**BF16, "gradient_clipping": 1.0},
    "fp16": {**ADAM, "fp16": {"enabled": True, "initial_scale_power": 8}},
    "stage 1": {**ADAM, "zero_optimization": {"stage": 1}},
    "stage 2, micro-batches": {**ADAM, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}},
    "host optimizer": {**BF16, **ON_HOST},
    "host optimizer, delayed": {**BF16, **ON_HOST, "gradient_clipping": 0.0, "dsgraph": {"delayed_update": True}},
    "OneBitAdam": {**_optimizer("OneBitAdam", freeze_step=2), "zero_optimization": {"stage": 0}},
    "OneBitLamb": {**_optimizer("OneBitLamb", lr=1e-2, freeze_step=2), "zero_optimization": {"stage": 0}},
    "Lamb": _optimizer("Lamb", lr=1e-2),
    "Muon": _optimizer("Muon"),
    "breakdown": {
        **ADAM,
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": 2},
    },
}
for _name in ("OneBitAdam", "OneBitLamb"):
    CASES[_name]["gradient_clipping"] = 0.0

MOST_WAITS = {"fp32": 0, "fp32, clipped": 1, "fp16": 1, "stage 1": 1, "OneBitAdam": 1, "OneBitLamb": 1}
"""The most waits of the host for the device in a step."""


def config_of(own: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The case's configuration, uncompiled by Inductor unless it says otherwise."""
    usual = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": None, "zero_optimization": {"stage": 3}}
    return {**usual, **own, **more, "dsgraph": {"codegen": "eager", **own.get("dsgraph", {})}}


def step_of(engine: Any, data: Any) -> Any:
    """One step, of as many micro-batches as the engine has."""

    def step() -> torch.Tensor:
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(*data)
            engine.backward(loss)
            engine.step()
        return loss

    return step


def run(config: dict[str, Any], device: torch.device, record: Any) -> dict[str, int]:
    """Trains six steps, and returns where the host waited in the steps after them."""
    engine, *_ = dsgraph.initialize(model=build(), config=config)
    assert next(engine.module.parameters()).device == device
    step = step_of(engine, batch(device))
    losses = [float(step().detach()) for _ in range(6)]
    record(losses=losses, norm=engine.get_global_grad_norm())
    started = time.perf_counter()
    step()
    synchronize()
    record(step_ms=1e3 * (time.perf_counter() - started))
    waits = host_waits(step)
    record(host_waits=waits)
    engine.close()
    assert losses[-1] < losses[0] - 0.02, losses
    return waits


@pytest.mark.parametrize("case", CASES)
def test_the_loss_falls(case, device, record):
    waits = run(config_of(CASES[case]), device, record)
    assert sum(waits.values()) <= MOST_WAITS.get(case, sum(waits.values())), waits


@pytest.mark.inductor
@pytest.mark.parametrize("own", [BF16, {**ADAM, "zero_optimization": {"stage": 1}}], ids=["bf16", "stage 1"])
def test_the_loss_falls_under_inductor(own, device, record):
    run(config_of({**own, "dsgraph": {"codegen": "inductor"}}), device, record)


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_low_precision_follows_float32(section, device, record):
    losses = {}
    for name, own in (("float32", ADAM), (section, {**ADAM, section: {"enabled": True}})):
        torch._dynamo.reset()
        if section == "fp16" and name == section:
            own[section]["initial_scale_power"] = 8
        engine, *_ = dsgraph.initialize(model=build(), config=config_of(own))
        step = step_of(engine, batch(device))
        losses[name] = [float(step().detach()) for _ in range(5)]
        engine.close()
    record(**losses)
    for mine, theirs in zip(losses[section], losses["float32"], strict=True):
        assert abs(mine - theirs) < 3e-2


def test_train_batch_with_the_engine_s_own_loader(device, record):
    """The loader's batches are on the CPU: the engine brings them to the model."""
    rows = list(zip(*(tensor.cpu() for tensor in batch(device, rows=16, length=32)), strict=True))
    engine, _, loader, _ = dsgraph.initialize(model=build(), config=config_of(ADAM), training_data=rows)
    losses = [float(engine.train_batch()) for _ in range(4)]
    record(losses=losses)
    for inputs in loader:
        engine.backward(engine(*inputs))
        engine.step()
        break
    engine.close()
    assert all(5 < loss < 8 for loss in losses)


@pytest.mark.parametrize("case", ["bf16, clipped", "host optimizer", "stage 1"])
def test_a_checkpoint_comes_back(case, device, tmp_path, record):
    data = batch(device)
    engine, *_ = dsgraph.initialize(model=build(), config=config_of(CASES[case]))
    step = step_of(engine, data)
    for _ in range(2):
        step()
    engine.save_checkpoint(str(tmp_path), tag="here")
    expected = [float(step().detach()) for _ in range(2)]
    engine.load_checkpoint(str(tmp_path), tag="here")
    again = [float(step().detach()) for _ in range(2)]
    engine.close()
    record(expected=expected, again=again)
    torch.testing.assert_close(torch.tensor(again), torch.tensor(expected), rtol=1e-4, atol=1e-4)

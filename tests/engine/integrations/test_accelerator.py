"""Loops for accelerate, run with `Accelerator` (DDP) and with `DsgraphAccelerator` on the same two ranks.

Each loop notes its losses, norms and rates; these, and the parameters at its end, are those of plain accelerate.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dsgraph
from tests.distributed.training import full
from tests.engine.integrations.test_trainer import _as_launched as as_launched

pytest.importorskip("accelerate")

pytestmark = pytest.mark.distributed


@dataclass
class Run:
    """One run of a loop.

    Attributes:
        make: Makes the accelerator, with more arguments of it.
        noted: Losses, norms and rates, in their order.
        models: What was trained: compared at the end.
    """

    make: Callable[..., Any]
    noted: list[float] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)

    def note(self, *values: Any) -> None:
        self.noted += [float(value) for value in values]

    def parameters(self, accelerator: Any) -> list[Tensor]:
        return [full(p.detach()) for model in self.models for p in accelerator.unwrap_model(model).parameters()]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(number: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return 3 * torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * number + rank))


def loader() -> DataLoader:
    rows = torch.randn(44, 8, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(3 * rows), batch_size=2)


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def by_hand(run: Run) -> Any:
    """Micro-batches under `no_sync`, and one outside."""
    accelerator = run.make()
    model = net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for number in range(8):
        with accelerator.no_sync(model) if number % 4 < 3 else contextlib.nullcontext():
            loss = model(batch(number)).square().mean() / 4
            accelerator.backward(loss)
            run.note(loss)
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    run.models.append(model)
    return accelerator


def by_hand_reduced_each(run: Run) -> Any:
    """Micro-batches that all reduce; gradients are dropped between forward and backward."""
    accelerator = run.make()
    model = net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for number in range(9):
        loss = model(batch(number)).square().mean() / 3
        if number % 3 == 0:
            optimizer.zero_grad()
        accelerator.backward(loss)
        run.note(loss)
        if number % 3 == 2:
            optimizer.step()
            run.note(optimizer.param_groups[0]["lr"])
    run.models.append(model)
    return accelerator


def accumulated(run: Run) -> Any:
    """`accumulate`, with a last step of fewer micro-batches at the end of the loader."""
    accelerator = run.make(gradient_accumulation_steps=3)
    model = net()
    model, optimizer, data = accelerator.prepare(model, adamw(model), loader())
    for _ in range(2):
        for (rows,) in data:
            with accelerator.accumulate(model):
                loss = model(rows).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.note(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()
                run.note(loss)
    run.models.append(model)
    return accelerator


def clipped_by_norm(run: Run) -> Any:
    """Any bound, any norm, some of the parameters; and torch's own function."""
    accelerator = run.make()
    model = net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for number in range(10):
        accelerator.backward(model(batch(number)).square().mean())
        bound = 0.1 * (number + 1)
        if number % 5 == 0:
            norm = accelerator.clip_grad_norm_(model.parameters(), bound)
        elif number % 5 == 1:
            norm = accelerator.clip_grad_norm_(model.parameters(), bound, norm_type=math.inf)
        elif number % 5 == 2:
            norm = accelerator.clip_grad_norm_([*model.parameters()][:2], bound)
        elif number % 5 == 3:
            norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
        else:
            norm = full(nn.utils.clip_grad_norm_(model.parameters(), bound))
        run.note(norm, full(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    run.models.append(model)
    return accelerator


def clipped_by_value(run: Run) -> Any:
    accelerator = run.make(gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for number in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(number)).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    run.models.append(model)
    return accelerator


def scheduled(run: Run) -> Any:
    """Two schedules, and a rate that the loop writes between backward and step."""
    accelerator = run.make(gradient_accumulation_steps=2)
    model = net()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, loader())
    second = accelerator.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer.optimizer, 0.1, total_steps=40))
    for number, (rows,) in enumerate(data):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            if number == 7:
                optimizer.param_groups[0]["lr"] = 0.3
            optimizer.step()
            (schedule if number < 5 else second).step()
            optimizer.zero_grad()
        run.note(optimizer.param_groups[0]["lr"], *schedule.get_last_lr())
    run.models.append(model)
    return accelerator


def skipped(run: Run) -> Any:
    """Steps that the loop leaves out, and a closure."""
    accelerator = run.make()
    model = net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for number in range(6):
        loss = model(batch(number)).square().mean()
        accelerator.backward(loss)
        if number % 3 != 1:
            optimizer.step()
        model.zero_grad() if number % 2 else optimizer.zero_grad()
        run.note(loss, accelerator.optimizer_step_was_skipped)

    def again() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(9)).square().mean()
        accelerator.backward(loss)
        run.note(loss)
        return loss

    optimizer.step(again)
    optimizer.step()  # with the same gradients once more
    run.models.append(model)
    return accelerator


def train(run: Run, accelerator: Any, model: Any, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        loss = model(batch(number)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.note(loss)


def two_phases(run: Run) -> Any:
    """The head alone first; then everything, prepared anew after `free_memory`."""
    accelerator = run.make()
    inner = net()
    inner[0].requires_grad_(False)
    model, optimizer = accelerator.prepare(inner, adamw(inner))
    train(run, accelerator, model, optimizer, range(3))
    inner = accelerator.unwrap_model(model)
    model, optimizer = accelerator.free_memory(model, optimizer)
    inner.requires_grad_(True)
    model, optimizer = accelerator.prepare(inner, adamw(inner))
    train(run, accelerator, model, optimizer, range(3, 6))
    run.models.append(model)
    return accelerator


def evaluated_only(run: Run) -> Any:
    accelerator = run.make()
    model, data = accelerator.prepare(net(), loader())
    model.eval()
    with torch.no_grad():
        for (rows,) in data:
            run.note(*accelerator.gather_for_metrics(model(rows).square().mean(-1)))
    run.models.append(model)
    return accelerator


def prepared_apart(run: Run) -> Any:
    """The optimizer is prepared after the model; it was made before."""
    accelerator = run.make()
    model = net()
    optimizer = adamw(model)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    train(run, accelerator, model, optimizer, range(4))
    run.models.append(model)
    return accelerator


def prepared_later(run: Run) -> Any:
    """The optimizer is made of the prepared model's parameters; the teacher is frozen."""
    accelerator = run.make()
    teacher = net().requires_grad_(False)
    model = accelerator.prepare(net())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(4):
        loss = (model(batch(number)) - teacher(batch(number + 1))).square().mean()
        accelerator.backward(loss)
        run.note(loss, accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    run.models.append(model)
    return accelerator


def adapters(run: Run) -> Any:
    """LoRA with `modules_to_save`, and the full state on every rank that saves it."""
    import peft
    import transformers

    accelerator = run.make(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    model = peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model, optimizer = accelerator.prepare(model, adamw(model))
    for number in range(6):
        tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(number + 9 * dist.get_rank()))
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                run.note(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        run.note(loss)
    saved = accelerator.get_state_dict(model)
    kept = peft.get_peft_model_state_dict(accelerator.unwrap_model(model), state_dict=saved)
    run.note(*(size for value in kept.values() for size in value.shape))
    run.models.append(model)
    return accelerator


def run_loop(loop: Callable[[Run], Any], config: dict[str, Any] | None) -> tuple[list[float], list[Tensor]]:
    from accelerate import Accelerator

    from dsgraph.engine.integrations.accelerator import DsgraphAccelerator

    with as_launched():
        make = Accelerator if config is None else lambda **more: DsgraphAccelerator(dsgraph_config=config, **more)
        run = Run(lambda **more: make(cpu=True, **more))
        accelerator = loop(run)
        return run.noted, run.parameters(accelerator)


def ds_config(stage: int, **more: Any) -> dict[str, Any]:
    sharded = {"stage": stage, "stage3_param_persistence_threshold": 20}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": sharded, "dsgraph": {"compile": False}, **more}


def compare(loop: Callable[[Run], Any], config: dict[str, Any]) -> None:
    expected, found = run_loop(loop, None), run_loop(loop, config)
    assert found[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-7)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


# The other loops and stages run the same lines.
@pytest.mark.parametrize(("loop", "stage"), ((by_hand, 1), (clipped_by_norm, 3), (skipped, 2)))
def test_a_loop_gives_the_numbers_of_accelerate(ranks, loop, stage):
    ranks(2).run(compare, loop, ds_config(stage))


LOOPS = (
    *(by_hand, by_hand_reduced_each, accumulated, clipped_by_norm, clipped_by_value, scheduled, skipped, two_phases),
    *(evaluated_only, prepared_apart, prepared_later, adapters),
)


@pytest.mark.full
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_give_the_numbers_of_accelerate(ranks, loop, stage):
    ranks(2).run(compare, loop, ds_config(stage))


@pytest.mark.full
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_compiled_loop_gives_the_numbers_of_accelerate(ranks, stage):
    ranks(2).run(compare, by_hand, {**ds_config(stage), "dsgraph": {"codegen": "eager"}})


def made(config: dict[str, Any], **more: Any) -> Any:
    from dsgraph.engine.integrations.accelerator import DsgraphAccelerator

    return DsgraphAccelerator(cpu=True, dsgraph_config=config, **more)


def half_precision(stage: int) -> None:
    """A loop that clips by itself, and an engine that clips: the scale, skipped steps, norms and parameters."""
    scaled = {"enabled": True, "initial_scale_power": 21, "hysteresis": 1}
    alone, *_ = dsgraph.initialize(
        model=net(), optimizer=torch.optim.AdamW, config=ds_config(stage, fp16=scaled, gradient_clipping=0.5)
    )
    with as_launched():
        accelerator = made(ds_config(stage, fp16=scaled))
        model = net()
        model, optimizer = accelerator.prepare(model, adamw(model, lr=1e-3))
        for number in range(8):
            alone.backward(alone(batch(number)).float().square().mean())
            alone.step()
            accelerator.backward(model(batch(number)).float().square().mean())
            accelerator.unscale_gradients()  # which clipping does not do again
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            assert norm == alone.get_global_grad_norm() == model.get_global_grad_norm() or not norm.isfinite()
            assert accelerator.optimizer_step_was_skipped == alone.was_step_skipped()
            with pytest.raises(dsgraph.EngineError, match="fp16 gradients were clipped"):
                accelerator.backward(model(batch(number)).float().square().mean())
            optimizer.zero_grad()
        assert 0 < model.skipped_steps == alone.skipped_steps < 8 and model.loss_scale == alone.loss_scale
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(full(mine.detach()), full(theirs.detach()))


def test_a_loop_clips_unscaled_gradients(ranks):
    ranks(2).run(half_precision, 2)


def dummies() -> None:
    from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

    auto = dict.fromkeys(("lr", "weight_decay", "betas"), "auto")
    rates = dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    sections = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": auto},
        "scheduler": {"type": "WarmupDecayLR", "params": {**rates, "warmup_type": "linear"}},
    }
    with as_launched():
        accelerator = made({**ds_config(2), **sections}, gradient_accumulation_steps=2)
        model = net()
        optimizer = DummyOptim(model.parameters(), lr=0.05, weight_decay=0.3, betas=(0.8, 0.9))
        schedule = DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=2)
        model, optimizer, data, schedule = accelerator.prepare(model, optimizer, loader(), schedule)
        found = []
        for (rows,) in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found += schedule.get_last_lr()
        decayed = [0.05 * left / 8 for left in (7, 7, 6, 5)]  # 20 steps of the schedule are 10 of two ranks
        assert found == pytest.approx([0, 0, 0, 0.025, 0.025, 0.05, 0.05, *decayed])
        (group,) = optimizer.param_groups
        assert (group["weight_decay"], tuple(group["betas"])) == (0.3, (0.8, 0.9))
        assert model.train_micro_batch_size_per_gpu() == 2 == model.gradient_accumulation_steps()


def refused(model: nn.Module) -> None:
    from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

    other, few = net(), ds_config(1, gradient_accumulation_steps=4)
    cases: list[tuple[dict[str, Any], dict[str, Any], Callable[[], tuple[Any, ...]], str]] = [
        (few, {}, lambda: (model,), "gradient_accumulation_steps is 4 in dsgraph_config, and 1"),
        (ds_config(1), {"mixed_precision": "bf16"}, lambda: (model,), "bf16 is False in dsgraph_config, and True"),
        (ds_config(1), {"dynamo_backend": "inductor"}, tuple, "dynamo_backend is INDUCTOR"),
        (ds_config(1), {}, lambda: (model, DummyOptim(model.parameters())), "no optimizer: pass one"),
        (ds_config(1), {}, lambda: (model, DummyScheduler(adamw(other))), "DummyScheduler needs the section"),
        (ds_config(1), {}, lambda: (DummyOptim([]),), "pass them with the model"),
        (ds_config(1), {}, lambda: (adamw(other),), "there is no model"),
        (ds_config(1), {}, lambda: (model, adamw(model), adamw(model)), "one model and one optimizer"),
    ]
    for config, more, given, message in cases:
        with as_launched(), pytest.raises((dsgraph.ConfigError, dsgraph.EngineError), match=message):
            made(config, **more).prepare(*given())


def refused_later(place: str) -> None:
    with as_launched():
        accelerator, other = made(ds_config(1)), net()
        model = accelerator.prepare(net())
        with pytest.raises(dsgraph.ConfigError, match="not a parameter of the model"):
            accelerator.prepare(adamw(other))
        optimizer = accelerator.prepare(adamw(model))
        with pytest.raises(dsgraph.EngineError, match="has an optimizer already"):
            accelerator.prepare(adamw(model))
        with accelerator.no_sync(model):
            accelerator.backward(model(batch(0)).sum())
        with pytest.raises(dsgraph.EngineError, match=r"write `if accelerator\.sync_gradients:` before"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(dsgraph.AccumulationError, match="before the accumulated gradients were reduced"):
            optimizer.step()
        with pytest.raises(dsgraph.CheckpointError, match=r"or after zero_grad\(\)"):
            accelerator.save_state(place)
        with pytest.raises(dsgraph.EngineError, match="the loop of an accelerator calls backward"):
            model.train_batch(iter([]))


def test_dummies_fill_auto_and_what_contradicts_is_refused(ranks, tmp_path):
    ranks(2).run(dummies)
    ranks(2).run(refused, net())
    ranks(2).run(refused_later, str(tmp_path))

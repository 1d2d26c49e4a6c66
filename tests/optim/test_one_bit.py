"""1-bit Adam and LAMB: numbers are those of the papers' equations, written out, on any number of ranks."""

from __future__ import annotations

import inspect
import json
import math
import re
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

import dsgraph
from dsgraph.optim.one_bit import OneBitAdam, OneBitLamb
from dsgraph.utils.errors import ConfigError, EngineError, PartitionError
from tests.distributed.training import full

_FREEZE, _STEPS = 4, 50
_LR, _BETAS, _EPS = 1e-2, (0.9, 0.99), 1e-3


class _Model(nn.Module):
    """Odd sizes: 15, 5, 35, 7 numbers, some fewer than ranks times eight; one parameter is read twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.last = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        return (self.last(hidden) * self.scale).square().mean()


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * step + rank))


def _config(kind: str, stage: int, **more: Any) -> dict[str, Any]:
    params = {"lr": _LR, "betas": list(_BETAS), "eps": _EPS, "weight_decay": 0.1, "freeze_step": _FREEZE}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 6},
        "gradient_clipping": 0.0,
        "dsgraph": {"codegen": "eager"},
        "optimizer": {"type": kind, "params": params},
        **more,
    }


def _compressed(x: Tensor) -> Tensor:
    """Its signs times its scale."""
    scale = (torch.linalg.vector_norm(x.double()) / math.sqrt(max(x.numel(), 1))).float()
    return torch.where(torch.signbit(x), -scale, scale)


class _Reference:
    """The computation of the ranks in one process: from the gradients of each rank to the averaged momentum."""

    def __init__(self, model: nn.Module, world: int) -> None:
        self.world, self.params = world, list(model.parameters())
        self.momentum = [torch.zeros_like(p) for p in self.params]
        self.variance = [torch.zeros_like(p) for p in self.params]
        self.worker = [[torch.zeros(p.numel()) for p in self.params] for _ in range(world)]
        self.owner = [[torch.zeros_like(c) for c in torch.zeros(p.numel()).chunk(world)] for p in self.params]

    def exchange(self, number: int, grads: list[Tensor]) -> Tensor:
        momentum, sent = self.momentum[number].view(-1), []
        keep, rate = torch.tensor(_BETAS[0]), torch.tensor(1 - _BETAS[0])
        for rank, grad in enumerate(grads):
            x = momentum * keep + grad.reshape(-1) * rate + self.worker[rank][number]
            sent.append(torch.cat([_compressed(chunk) for chunk in x.chunk(self.world)]))
            self.worker[rank][number] = x - sent[-1]
        parts = []
        for chunk, received in enumerate(zip(*(each.chunk(self.world) for each in sent), strict=True)):
            y = sum(received[1:], received[0]) / self.world + self.owner[number][chunk]
            parts.append(_compressed(y))
            self.owner[number][chunk] = y - parts[-1]
        return torch.cat(parts).view_as(self.momentum[number])


class _ReferenceAdam(_Reference):
    @torch.no_grad()
    def step(self, step: int, grads: list[list[Tensor]]) -> None:
        beta1, beta2 = _BETAS
        for number, param in enumerate(self.params):
            mine = [each[number] for each in grads]
            if step <= _FREEZE:
                grad = torch.stack(mine).sum(0) / self.world
                self.momentum[number].lerp_(grad, 1 - beta1)
                self.variance[number].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                variance = self.variance[number] / (1 - beta2**step)
            else:
                self.momentum[number] = self.exchange(number, mine)
                variance = self.variance[number] / (1 - beta2**_FREEZE)
            param.mul_(1 - _LR * 0.1)
            param.addcdiv_(self.momentum[number], variance.sqrt() + _EPS, value=-_LR / (1 - beta1**step))


class _ReferenceLamb(_Reference):
    def __init__(self, model: nn.Module, world: int) -> None:
        super().__init__(model, world)
        self.coefficient = [torch.zeros(()) for _ in self.params]
        self.factor = [torch.ones(()) for _ in self.params]
        self.fresh = self.variance

    @torch.no_grad()
    def step(self, step: int, grads: list[list[Tensor]]) -> None:
        beta1, beta2 = _BETAS
        if step == _FREEZE + 1:
            self.fresh = [each.clone() for each in self.variance]
        for number, param in enumerate(self.params):
            mine, variance = [each[number] for each in grads], self.variance[number]
            if step <= _FREEZE:
                grad = torch.stack(mine).sum(0) / self.world
                self.momentum[number].mul_(beta1).add_(grad, alpha=1 - beta1)
                variance.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                update = self.momentum[number] / (variance.sqrt() + _EPS) + 0.1 * param
                ratio = (param.norm() / update.norm()).clamp(0.01, 10.0)
                if ratio != 1:
                    self.coefficient[number] = 0.9 * self.coefficient[number] + 0.1 * ratio
                param.sub_(update * (ratio * _LR * math.sqrt(1 - beta2**step) / (1 - beta1**step)))
                continue
            before = self.momentum[number]
            now = self.momentum[number] = self.exchange(number, mine)
            divisor = variance.sqrt() + _EPS
            grad = (now - before * beta1) / (1 - beta1)
            self.fresh[number].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            alone = now / divisor
            update = alone + 0.1 * param
            bias, frozen = (math.sqrt(1 - beta2**at) for at in (step, _FREEZE))
            factor = (divisor / (self.fresh[number].sqrt() + _EPS)).max() * (bias / frozen)
            share = (alone.norm() / update.norm()).clamp(max=1.0)
            factor = (factor * share + 1 - share).clamp(0.5, 4.0)
            factor = factor.clamp(self.factor[number] * 0.9, self.factor[number] * 1.1)
            self.factor[number] = factor
            rate = _LR * bias / (1 - beta1**step)
            param.sub_(update * (self.coefficient[number] * factor * rate))


def _equals_reference(kind: str, stage: int, codegen: str, micro: int = 1) -> None:
    """Start each step from the engine's parameters, because one bit of rounding could change a sign and all later
    steps.

    So gradients are equal bit for bit, and so must momenta and errors be in every step after the warm-up.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = _Model()
    config = _config(kind, stage, gradient_accumulation_steps=micro)
    config["dsgraph"] = {"codegen": codegen} if codegen else {"compile": False}
    engine, *_ = dsgraph.initialize(model=_Model(), config=config)
    reference = (_ReferenceAdam if kind == "OneBitAdam" else _ReferenceLamb)(alone, world)
    mine, state = list(engine.module.parameters()), engine.optimizer.state
    for step in range(1, _STEPS + 1):
        for here, there in zip(mine, alone.parameters(), strict=True):
            there.data.copy_(full(here.detach()))
        for part in range(micro):
            engine.backward(engine(_batch(step + 100 * part, rank)))
            engine.step()
        grads = []
        for other in range(world):
            alone.zero_grad()
            for part in range(micro):
                (alone(_batch(step + 100 * part, other)) / micro).backward()
            grads.append([param.grad.clone() for param in alone.parameters()])
        reference.step(step, grads)
        for number, (here, there) in enumerate(zip(mine, alone.parameters(), strict=True)):
            torch.testing.assert_close(full(here.detach()), there.detach(), rtol=1e-5, atol=1e-6)
            momentum = full(state[here]["exp_avg"])
            if step <= _FREEZE:  # averaged in whatever order the backend has
                torch.testing.assert_close(momentum, reference.momentum[number])
                reference.momentum[number] = momentum.clone()
                continue
            worker, owner = full(state[here]["worker_error"]), full(state[here]["owner_error"])
            check = _check_close if codegen == "inductor" else _check_equal  # which computes gradients in another order
            check(momentum, reference.momentum[number])
            check(worker, torch.stack([each[number] for each in reference.worker]))
            check(owner, torch.cat(reference.owner[number]))
            reference.momentum[number] = momentum.clone()
            for each, own in zip(reference.worker, worker, strict=True):
                each[number] = own.clone()
            reference.owner[number] = [each.clone() for each in owner.chunk(world)]
    assert engine.optimizer.is_compressing


def _check_equal(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found, wanted)


def _check_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


_SHARP = (("OneBitAdam", 0, 3), ("OneBitLamb", 1, 2))  # and Adam at stage 1 below


@pytest.mark.parametrize(
    ("kind", "stage", "world"),
    [
        pytest.param(*case, marks=[] if case in _SHARP else pytest.mark.full)
        for case in product(("OneBitAdam", "OneBitLamb"), (0, 1), (1, 2, 3, 4))
    ],
)
def test_equals_the_papers_equations(kind, stage, world, ranks):
    ranks(world).run(_equals_reference, kind, stage, "eager")


@pytest.mark.full  # the same equations with codegen "eager" precede
@pytest.mark.parametrize("codegen", ["", "inductor"])
def test_equals_them_uncompiled_and_under_inductor(codegen, ranks):
    ranks(2).run(_equals_reference, "OneBitAdam", 1, codegen)


@pytest.mark.parametrize("codegen", ["", pytest.param("eager", marks=pytest.mark.full)])
def test_micro_batches_are_one_gradient(codegen, ranks):
    ranks(2).run(_equals_reference, "OneBitAdam", 0, codegen, 2)


def _engine(kind: str = "OneBitAdam", stage: int = 0, **more: Any) -> dsgraph.Engine:
    return dsgraph.initialize(model=_Model(), config=_config(kind, stage, **more))[0]


def _train(engine: dsgraph.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(_batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _compiles_once_more() -> None:
    torch._dynamo.reset()
    counters.clear()
    engine = _engine()
    _train(engine, range(1, _FREEZE + 1))
    before = counters["stats"]["unique_graphs"]
    _train(engine, range(_FREEZE + 1, _FREEZE + 6))
    assert counters["stats"]["unique_graphs"] == 2 * before
    report = str(dsgraph.report(engine.module))
    assert "gradients of 252 bytes are sent as" in report, report


def test_the_change_compiles_once_and_is_reported(ranks):
    ranks(2).run(_compiles_once_more)


def _goes_on(folder: str, kind: str, stage: int, how: dict[str, Any], *, saves: bool, is_equal: bool) -> str:
    """Says what was printed by loading."""
    if saves:
        engine = _engine(kind, stage, dsgraph=how)
        _train(engine, range(1, 9))
        engine.save_checkpoint(folder)
        torch.save(_train(engine, range(9, 16)), f"{folder}/wanted.{dist.get_rank()}")
        return ""
    engine = _engine(kind, stage, dsgraph=how)
    with redirect_stdout(StringIO()) as said:
        engine.load_checkpoint(folder)
    assert engine.optimizer.is_compressing
    found = _train(engine, range(9, 16))
    if is_equal:
        assert found == torch.load(f"{folder}/wanted.{dist.get_rank()}")
    else:
        assert all(map(math.isfinite, found))
    return said.getvalue()


@pytest.mark.parametrize("how", [{"compile": False}, pytest.param({"codegen": "eager"}, marks=pytest.mark.full)])
@pytest.mark.parametrize(("kind", "stage"), [("OneBitAdam", 1), pytest.param("OneBitLamb", 0, marks=pytest.mark.full)])
def test_a_checkpoint_has_momentum_and_errors(kind, stage, how, ranks, tmp_path):
    ranks(2).run(_goes_on, str(tmp_path), kind, stage, how, saves=True, is_equal=True)
    said, _ = ranks(2).run(_goes_on, str(tmp_path), kind, stage, how, saves=False, is_equal=True)
    assert "start at zero" not in said
    said, *_ = ranks(3).run(_goes_on, str(tmp_path), kind, stage, how, saves=False, is_equal=False)
    assert "compression errors start at zero: another number of ranks saved them" in said


def _skips(stage: int) -> None:
    engine = _engine(stage=stage, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    _train(engine, range(1, 9))
    state = engine.optimizer.state
    assert engine.counts.skipped == 0
    before = {param: {key: full(value).clone() for key, value in of.items()} for param, of in state.items()}
    params = {param: full(param.detach()).clone() for param in state}
    batch = _batch(9, dist.get_rank())
    loss = engine(batch)
    engine.backward(loss * 1e10 if dist.get_rank() == 1 else loss)  # one rank's gradients overflow
    engine.step()
    assert engine.counts.skipped == 1
    for param, of in state.items():
        assert torch.equal(full(param.detach()), params[param])
        for key, value in of.items():
            assert torch.equal(full(value), before[param][key]), key
    _train(engine, range(10, 14))
    assert engine.counts.skipped == 1
    changed = [
        not torch.equal(full(of["worker_error"]), before[param]["worker_error"])
        for param, of in state.items()
        if param.numel() > 1  # of one number alone, its scale says all
    ]
    assert all(changed)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_skipped_step_leaves_momentum_and_errors(stage, ranks):
    ranks(2).run(_skips, stage)


def _scale_does_not_matter() -> None:
    """Gradients come multiplied by the loss's scale, a power of two: the momentum is the same bit for bit."""
    momenta = []
    for power in (4, 9):
        engine = _engine(fp16={"enabled": True, "initial_scale_power": power}, dsgraph={"compile": False})
        _train(engine, range(1, 9))
        momenta.append([full(of["exp_avg"]) for of in engine.optimizer.state.values()])
    for one, other in zip(*momenta, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-4)


def test_the_scale_of_the_loss_is_taken_out(ranks):
    ranks(2).run(_scale_does_not_matter)


def _two_reductions() -> None:
    model = dsgraph.partition(_Model(), stage=0)
    run = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    optimizer = OneBitAdam(model.parameters(), model, lr=_LR, freeze_step=1)
    for step in (1, 2, 3):
        run(_batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run(_batch(4, 0)).backward()
    with pytest.raises(PartitionError, match=r"'(scale|first|last).*was reduced twice before a step"):
        run(_batch(5, 0)).backward()
    optimizer.zero_grad()
    run(_batch(6, 0)).backward()
    optimizer.step()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(EngineError, match="is no averaged momentum"):
        optimizer.step()


def test_a_momentum_takes_in_one_gradient_a_step(ranks):
    ranks(2).run(_two_reductions)


def _other_stages() -> None:
    for stage in (2, 3):
        model = dsgraph.partition(_Model(), stage=stage)
        optimizer = OneBitAdam(model.parameters(), model, freeze_step=1)
        model(_batch(0, 0)).backward()
        with pytest.raises(EngineError, match=f"OneBitAdam: at stage {stage} no rank holds.*stage 0 or 1; nothing"):
            optimizer.step()


def test_other_stages_are_refused_by_the_optimizer(ranks):
    ranks(2).run(_other_stages)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"zero_optimization": {"stage": 2}}, "OneBitAdam with zero_optimization.stage 2: 1-bit compression needs"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "with zero_optimization.offload_optimizer"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"amsgrad": True}}}, "amsgrad=True is not supported"),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 0}}},
            "freeze_step is 0; it takes a whole number",
        ),
        ({"optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 2.5}}}, r"OneBitLamb: freeze_step is 2\.5; it"),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": "3"}}},
            "freeze_step is '3', a text: remove the quotes",
        ),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": True}}}, "freeze_step is True; it takes"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"betas": [0.9]}}}, r"betas is \[0\.9\]; it takes two numbers"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"bias_correction": False}}}, "bias_correction=False is not"),
        (
            {"optimizer": {"type": "OneBitLamb", "params": {"freeze_steps": 3}}},
            "OneBitLamb does not support 'freeze_steps'",
        ),
        ({"optimizer": {"type": "ZeroOneAdam"}}, "ZeroOneAdam is not supported: use OneBitAdam"),
    ],
)
def test_what_cannot_be_had_is_refused(more, message, one_rank):
    with pytest.raises(ConfigError, match=message):
        dsgraph.initialize(model=_Model(), config={**_config("OneBitAdam", 0), **more})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_parameters_of_another_dtype_are_refused_and_the_model_is_as_it_was(dtype, one_rank):
    model = _Model()
    model.last.to(dtype)
    with pytest.raises(ConfigError, match=rf"last\.weight is {dtype}, .*convert the model to float32"):
        dsgraph.initialize(model=model, config=_config("OneBitAdam", 0))
    assert not isinstance(model.first.weight, DTensor)
    held = list(model.first.parameters())  # what it updates is float32
    dsgraph.initialize(model=model, model_parameters=held, config=_config("OneBitAdam", 0))


def test_what_has_no_effect_is_said(one_rank, capsys):
    config = _config("OneBitAdam", 0, gradient_clipping=0.5)
    config["optimizer"]["params"]["cuda_aware"] = True
    dsgraph.initialize(model=_Model(), config=config)
    said = capsys.readouterr().out
    assert "optimizer.params.cuda_aware has no effect" in said
    assert "gradient_clipping 0.5 has an effect only during the warm-up of OneBitAdam" in said
    assert "freeze_step" not in said


def test_defaults_that_matter_are_said(one_rank, capsys):
    config = _config("OneBitLamb", 0)
    del config["gradient_clipping"]
    config["optimizer"]["params"]["freeze_step"] = "auto"
    engine, *_ = dsgraph.initialize(model=_Model(), config=config)
    said = capsys.readouterr().out
    assert "freeze_step is not set: OneBitLamb trains as LAMB for 100,000 steps, the default" in said
    assert engine.optimizer.freeze_step == 100_000
    assert "gradient_clipping, 1.0 by default, has an effect only during the warm-up of OneBitLamb" in said


@pytest.mark.parametrize(
    "how", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}]
)
def test_after_the_warm_up_there_is_no_norm_of_gradients(how, one_rank, tmp_path):
    path = tmp_path / "metrics"
    engine = _engine(gradient_clipping=1.0, dsgraph={"compile": False, "metrics_file": str(path)}, **how)
    _train(engine, range(1, _FREEZE + 1))
    assert engine.get_global_grad_norm() > 0
    _train(engine, range(_FREEZE + 1, _FREEZE + 3))
    assert engine.get_global_grad_norm() is None
    assert engine.counts.skipped == 0
    engine.close()
    written = [("Train/Samples/grad_norm" in json.loads(line)) for line in path.read_text().splitlines()]
    assert written == [True] * _FREEZE + [False] * 2


def test_the_page_lists_the_parameters_with_their_defaults():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "slow-networks.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, flags=re.MULTILINE))
    taken = {**inspect.signature(OneBitAdam).parameters, **inspect.signature(OneBitLamb).parameters}
    for name in ("params", "model", "others"):
        del taken[name]
    wanted = {name: json.dumps(each.default) for name, each in taken.items()}
    assert {name: rows.get(name, "").strip("`").replace(",", "") for name in wanted} == {
        name: value.replace(",", "") for name, value in wanted.items()
    }

"""The engine against a plain loop in one process."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

import dsgraph
from dsgraph.compat.compiled import allowing_recompiles
from dsgraph.compat.dynamo import isolated
from dsgraph.engine.schedules.by_name import WarmupLR
from dsgraph.optim.lamb import Lamb
from tests.distributed.training import full
from tests.models import build, tokens

from .training import CASE, batches, check_parameters, compare, config

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0), None


def _lamb(model):
    return Lamb(model.parameters(), lr=1e-2, weight_decay=0.1, min_coeff=0.0), None


def _warming(model):
    optimizer, _ = _adamw(model)
    return optimizer, WarmupLR(optimizer, warmup_max_lr=1e-2, warmup_num_steps=4)


WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}}
# The least ratio that is usual would hide what the norms are.
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1, "min_coeff": 0.0}}}


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro_batches", (1, 3))
@pytest.mark.parametrize(
    ("settings", "make_alone"),
    [
        ({"gradient_clipping": 0.0}, _adamw),
        ({"gradient_clipping": 0.05}, _adamw),
        (WARMUP, _warming),
        (LAMB, _lamb),
    ],
    ids=("plain", "clipped", "warming", "lamb"),
)
def test_steps_are_those_of_one_process(ranks, stage, micro_batches, settings, make_alone):
    ranks(2).run(compare, stage, micro_batches, settings, make_alone)


def _low_precision(stage: int, section: str) -> tuple[list[float], list[str]]:
    wanted = config(stage, **{section: {"enabled": True}}, gradient_accumulation_steps=2)
    engine, _, _, _ = dsgraph.initialize(model=build(CASE), config=wanted)
    data = batches(torch.distributed.get_rank())
    first = next(data)
    losses = []
    for _ in range(8):  # the first ones may overflow
        losses.append(float(engine.train_batch(iter([first, first]))))
    seen = {str(param.dtype) for param in engine.module.parameters()}
    return losses, sorted(seen)


@pytest.mark.parametrize(
    ("section", "stage"),
    [
        *(("fp16", 2), ("bf16", 3)),
        *(
            pytest.param(section, stage, marks=pytest.mark.full)
            for section, stage in product(("fp16", "bf16"), STAGES)
            if (section, stage) not in (("fp16", 2), ("bf16", 3))
        ),
    ],
)
def test_low_precision_trains_and_masters_stay_in_float32(ranks, stage, section):
    losses, dtypes = ranks(2).run(_low_precision, stage, section)[0]
    assert losses[-1] < 0.9 * losses[0]
    assert dtypes == ["torch.float32"]


class _Overflowing(nn.Module):
    """Its gradient overflows float16 when the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) ** 2).mean()


def _skip(stage: int) -> list[tuple]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    wanted = config(stage, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}, **WARMUP)
    engine, _, _, schedule = dsgraph.initialize(model=_Overflowing(), config=wanted)
    found = []
    for step in range(4):
        before = [full(param.detach()).clone() for param in engine.module.parameters()]
        large = 6e4 if (step, rank) == (1, 1) else 1.0  # on one rank alone
        loss = engine(torch.full((2, 8), large))
        engine.backward(loss)
        engine.step()
        changed = any(
            not torch.equal(full(param.detach()), old)
            for param, old in zip(engine.module.parameters(), before, strict=True)
        )
        found.append((changed, engine.loss_scale.scale, schedule.last_batch_iteration, engine.skipped_steps))
    return found


@pytest.mark.parametrize("stage", (0, 3))
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, stage):
    # The first two steps of a warm-up have a rate of 0; the skipped one does not count.
    expected = [(False, 16, 0, 0), (False, 8, 0, 1), (False, 8, 1, 1), (True, 8, 2, 1)]
    assert ranks(2).run(_skip, stage) == [expected, expected]


def _taken_over(how: str, tolerance: float, **settings: object) -> None:
    model, alone = build(CASE), build(CASE)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    given = make if how == "function" else make(model.parameters())
    wanted = config(3, gradient_clipping=0.0, **settings)
    del wanted["optimizer"]
    engine, optimizer, _, _ = dsgraph.initialize(model=model, optimizer=given, config=wanted)
    assert how == "function" or optimizer is given
    theirs = make(alone.parameters())
    data, same = batches(0), batches(0)  # all ranks have the same batches: the mean is one rank's
    for _ in range(2):
        engine.train_batch(data)
        alone(*next(same)).backward()
        theirs.step()
        theirs.zero_grad()
        check_parameters(engine, alone, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("how", ("function", "object"))
def test_an_optimizer_of_the_callers_is_taken_over(ranks, how):
    ranks(2).run(_taken_over, how, 1e-5)


def test_gradients_are_unscaled_before_the_optimizer_sees_them(ranks):
    # Of SGD, whose step is as long as the gradient; Adam's is not.
    ranks(2).run(_taken_over, "object", 1e-2, fp16={"enabled": True, "initial_scale_power": 10})


def _no_sync(stage: int) -> None:
    engine, _, _, _ = dsgraph.initialize(model=build(CASE), config=config(stage, gradient_clipping=0.0))
    alone = build(CASE)
    rank, optimizer = torch.distributed.get_rank(), _adamw(alone)[0]
    mine, everybody = batches(rank), [batches(other) for other in range(2)]
    with engine.no_sync():
        for _ in range(2):
            engine.backward(engine(*next(mine)))
        with pytest.raises(dsgraph.EngineError, match="step inside no_sync"):
            engine.step()
    assert all(bool(param.grad.to_local().isnan().all()) for param in engine.module.parameters()), "not reduced yet"
    engine.backward(engine(*next(mine)))
    engine.step()
    for one in everybody:
        for _ in range(3):
            (alone(*next(one)) / 2).backward()
    optimizer.step()
    check_parameters(engine, alone)


def _no_sync_at_stage_3() -> None:
    engine, _, _, _ = dsgraph.initialize(model=build(CASE), config=config(3))
    with pytest.raises(dsgraph.EngineError, match="no_sync: at stage 3"), engine.no_sync():
        pass


@pytest.mark.parametrize("stage", (pytest.param(1, marks=pytest.mark.full), 2))
def test_inside_no_sync_nothing_is_reduced(ranks, stage):
    ranks(2).run(_no_sync, stage)


def test_no_sync_is_refused_at_stage_3(ranks):
    ranks(1).run(_no_sync_at_stage_3)


def _forward_without_backward() -> None:
    settings = config(0, gradient_accumulation_steps=2, gradient_clipping=0.0)
    engine, _, _, _ = dsgraph.initialize(model=build(CASE), config=settings)
    alone = build(CASE)
    optimizer, _ = _adamw(alone)
    engine(*tokens(0, 0))  # a micro-batch that is left out
    engine.step()
    batch = tokens(1, 0)
    engine.backward(engine(*batch))
    engine.step()
    (alone(*batch) / 2).backward()
    optimizer.step()
    check_parameters(engine, alone)


def test_a_forward_without_a_backward_does_not_keep_the_step_open(ranks):
    ranks(2).run(_forward_without_backward)


class _Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor(number)


def _loaded() -> list[list[int]]:
    model = nn.Linear(4, 4)
    settings = config(0, dataloader_drop_last=True)
    _, _, loader, _ = dsgraph.initialize(model=model, training_data=_Data(), config=settings)
    assert loader is not None
    return [[int(item) for batch in loader for item in batch] for _ in range(2)]


def _too_few() -> None:
    model = nn.Linear(4, 4)
    settings = {**config(0), "train_micro_batch_size_per_gpu": 6, "dataloader_drop_last": True}
    with pytest.raises(dsgraph.ConfigError, match=r"training_data has 11 samples; .* takes 12"):
        dsgraph.initialize(model=model, training_data=_Data(), config=settings)
    assert type(model) is nn.Linear and type(model.weight) is nn.Parameter, "nothing was changed"


def test_a_dataset_that_fills_no_micro_batch_is_refused(ranks):
    ranks(2).run(_too_few)


def test_each_rank_loads_its_share_in_another_order_each_epoch(ranks):
    first, second = ranks(2).run(_loaded)
    for mine, theirs in zip(first, second, strict=True):
        assert len(mine) == len(theirs) == 4 and not set(mine) & set(theirs)
    assert first[0] != first[1]


def _two_engines() -> None:
    engines = [dsgraph.initialize(model=build(CASE, seed), config=config(seed + 1))[0] for seed in range(2)]
    apart = [dsgraph.initialize(model=build(CASE, seed), config=config(seed + 1))[0] for seed in range(2)]
    for _ in range(2):
        for engine, data in zip(engines, (batches(0), batches(0, 5)), strict=True):
            engine.train_batch(data)
    for engine, data in zip(apart, (batches(0), batches(0, 5)), strict=True):
        for _ in range(2):
            engine.train_batch(type(data).__iter__(batches(0) if engine is apart[0] else batches(0, 5)))
    for one, other in zip(engines, apart, strict=True):
        for mine, theirs in zip(one.module.parameters(), other.module.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())


@pytest.mark.full  # three engines
def test_engines_live_side_by_side(ranks):
    ranks(2).run(_two_engines)


def _many_engines() -> None:
    engines = []
    with allowing_recompiles(2):
        for _ in range(4):
            wanted = config(3, dsgraph={"codegen": "eager", "strict": True})  # refuses what looks like a recompile
            engine, _, _, _ = dsgraph.initialize(model=build(CASE), config=wanted)
            engine.train_batch(batches(0))
            assert "nothing was compiled by dsgraph" not in str(dsgraph.report(engine.module))
            engines.append(engine)  # Dynamo forgets what it compiled of a model that is gone


@pytest.mark.skipif(not isolated(), reason="torch before 2.13 counts the compiles of all engines together")
def test_each_engine_is_compiled_beyond_the_limit_of_recompiles(ranks):
    ranks(1).run(_many_engines)


def _refuses(model: nn.Module, arguments: dict, message: str) -> None:
    with pytest.raises(dsgraph.ConfigError, match=message):
        dsgraph.initialize(**{"model": model, "config": config(0), **arguments})


def _schedule_of_another() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(build(CASE).parameters(), lr=1), 1)


def _refusals() -> None:
    model = build(CASE)
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(*tokens(0, 0)).backward()
    used.step()
    used.zero_grad()
    before = [id(param) for param in model.parameters()]
    _refuses(model, {"optimizer": used}, "SGD has stepped already")
    del used
    for arguments, message in [
        ({"optimizer": torch.optim.SGD(build(CASE).parameters(), lr=1)}, "which is not a parameter of the model"),
        ({"lr_scheduler": _schedule_of_another()}, "StepLR for another optimizer"),
        ({"mpu": object()}, r"mpu is a object without get_data_parallel_group\(\)"),
        ({"model": None}, "model is NoneType"),
        ({"config": None}, "no configuration"),
        ({"config": {"train_batch_size": 2}}, "no optimizer: pass one"),
        ({"config": config(0, optimizer={"type": "Adamm"})}, r"did you mean 'Adam' or 'AdamW'\?"),
        ({"config": config(0, optimizer={"type": "SGD", "params": {"momentun": 1}})}, r"did you mean 'momentum'\?"),
        ({"config": config(0, optimizer={"type": "SGD", "params": {"lr": -1}})}, "of SGD: Invalid learning"),
        ({"config": config(0, optimizer={"type": "Muon", "params": {"model": 1}})}, "Muon does not support 'model'"),
        ({"config": config(0, scheduler={"type": "WarmupRL"})}, r"did you mean 'WarmupLR'\?"),
    ]:
        _refuses(model, arguments, message)
    assert [id(param) for param in model.parameters()] == before, "nothing was changed"
    twin = build(CASE)
    given = torch.optim.SGD(twin.parameters(), lr=1)
    groups = [{"params": list(twin.parameters())}]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        dsgraph.initialize(model=twin, optimizer=given, model_parameters=groups, config=config(0))
    assert "optimizer of the configuration has no effect" in said.getvalue()
    engine, _, _, _ = dsgraph.initialize(model=build(CASE), config=config(0))
    with pytest.raises(dsgraph.EngineError, match=r"found a tensor of shape \(2,\)"):
        engine.backward(torch.zeros(2, requires_grad=True))
    with pytest.raises(dsgraph.EngineError, match="the loss has no graph"):
        engine.backward(torch.zeros(()))


def test_what_cannot_be_taken_is_named_and_nothing_is_changed(ranks):
    ranks(1).run(_refusals)


def _by_arguments(path: str) -> int:
    parser = dsgraph.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", path])
    assert args.deepspeed
    return dsgraph.initialize(args, build(CASE))[0].train_batch_size()


def test_a_script_names_the_file_in_its_arguments(ranks, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config(2)))
    assert ranks(2).run(_by_arguments, str(path)) == [4, 4]


def _own_backward(micro_batches: int) -> None:
    settings = config(2, gradient_accumulation_steps=micro_batches)
    engine, _, _, _ = dsgraph.initialize(model=build(CASE), config=settings)
    data = batches(torch.distributed.get_rank())
    for _ in range(micro_batches - 1):
        engine(*next(data)).backward()
        engine.step()
    engine(*next(data)).backward()
    with pytest.raises(dsgraph.EngineError, match=r"engine.backward\(loss\).*in place of loss.backward\(\)"):
        engine.step()
    engine.zero_grad()
    engine.train_batch(data)
    assert engine.global_steps == 1


@pytest.mark.parametrize("micro_batches", (pytest.param(1, marks=pytest.mark.full), 2))
def test_gradients_that_the_engine_did_not_scale_are_refused(ranks, micro_batches):
    ranks(2).run(_own_backward, micro_batches)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optimizer": "AdamW"}, "optimizer is 'AdamW': expected an optimizer, or a function"),
        ({"lr_scheduler": 3}, "lr_scheduler is 3: expected a scheduler, or a function"),
        (
            {"config": {"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}},
            "lr is '1e-3', a text",
        ),
        ({"config": {"optimizer": {"type": "FusedAdam"}}}, r"'FusedAdam'; did you mean 'Adam'\?"),
    ],
)
def test_arguments_of_wrong_kinds_are_named(one_rank, arguments, said):
    wanted = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, **arguments.get("config", {})}
    with pytest.raises(dsgraph.ConfigError, match=said):
        dsgraph.initialize(model=nn.Linear(2, 2), **{**arguments, "config": wanted})


class _Mean(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()


def test_data_that_ends_amid_a_step_is_named(one_rank):
    wanted = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"}}
    wanted["dsgraph"] = {"compile": False}
    engine, *_ = dsgraph.initialize(model=_Mean(2, 1), config=wanted)
    with pytest.raises(dsgraph.EngineError, match="the iterator ended after micro-batch 1 of 2"):
        engine.train_batch(iter([torch.ones(1, 2)]))
    assert not engine.has_begun_step()
    before = full(engine.module._parameters["weight"]).clone()
    engine.train_batch(iter([torch.ones(1, 2)] * 2))
    assert engine.global_steps == 1 and not engine.has_begun_step(), "the dropped micro-batch does not count"
    for _ in range(2):  # a loop that drops gradients before each micro-batch steps all the same
        engine.zero_grad()
        engine.backward(engine(torch.ones(1, 2)))
        engine.step()
    assert engine.global_steps == 2 and not torch.equal(full(engine.module._parameters["weight"]), before)
    engine.close()


def _uncompiled(**more: object) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "dsgraph": {"compile": False},
        **more,
    }


def test_a_model_in_evaluation_mode_trains_in_an_engine_in_training_mode(one_rank):
    engine, *_ = dsgraph.initialize(model=_Mean(2, 1), config=_uncompiled(gradient_accumulation_steps=2))
    engine.module.eval()
    engine.backward(engine(torch.ones(1, 2)))
    assert bool(full(engine.module._parameters["weight"].grad).isnan().all()), "the first micro-batch accumulates"


class _Counted(dsgraph.Engine):
    """Counts the calls of what `train_batch` and `eval_batch` are made of."""

    calls: tuple[str, ...] = ()

    def forward(self, *args, **kwargs):
        self.calls += ("forward",)
        return super().forward(*args, **kwargs)

    def backward(self, *args, **kwargs):
        self.calls += ("backward",)
        return super().backward(*args, **kwargs)

    def step(self):
        self.calls += ("step",)
        super().step()


def test_whole_batches_call_the_methods_and_hooks_of_the_engine(one_rank):
    engine, *_ = dsgraph.initialize(model=_Mean(2, 1), config=_uncompiled())
    engine.__class__ = _Counted
    seen = []
    engine.register_forward_hook(lambda *_: seen.append(engine.training))
    engine.train_batch(iter([torch.ones(1, 2)]))
    assert engine.calls == ("forward", "backward", "step") and seen == [True]
    engine.eval_batch(iter([torch.ones(1, 2)]))
    assert engine.calls[3:] == ("forward",) and len(seen) == 2


def test_the_schedule_can_be_replaced_and_the_optimizer_cannot(one_rank):
    engine, optimizer, *_ = dsgraph.initialize(model=_Mean(2, 1), config=_uncompiled())
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine.train_batch(iter([torch.ones(1, 2)]))
    assert engine.get_lr() == [0.05]
    with pytest.raises(AttributeError, match=r"no setter|can't set attribute 'optimizer'"):
        engine.optimizer = optimizer

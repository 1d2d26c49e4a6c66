"""The engine of a model that the section `parallel` splits into stages."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
from typing import Any

import pytest
import torch
from torch import nn

import dsgraph
from dsgraph.utils.errors import CheckpointError

pytestmark = pytest.mark.distributed

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "parallel": {"pp": 2},
    "dsgraph": {"compile": False},
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), _Mean())


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean()


def _batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 2, 4, generator=torch.Generator().manual_seed(1)).unbind())


def _engine() -> dsgraph.Engine:
    engine, *_ = dsgraph.initialize(model=_model(), config=CONFIG, example=(torch.ones(2, 4),))
    return engine


def _train() -> tuple[list[float], str, list[str]]:
    engine, said = _engine(), io.StringIO()
    with contextlib.redirect_stdout(said):
        data = iter(_batches(4))
        losses = [float(engine.train_batch(data)) for _ in range(2)]
    names = [name for name, _ in engine.named_parameters()]
    assert names == list(engine.state_dict()) and engine.skipped_steps == 0 and engine.get_lr() == [0.1]
    assert engine.gradient_accumulation_steps() == 2 and engine.counts.micro == 4
    engine.close()
    return losses, said.getvalue(), names


def _alone() -> list[float]:
    model, batches, losses = _model(), _batches(4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for pair in (batches[:2], batches[2:]):
        loss = sum(model(batch) for batch in pair) / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_steps_are_logged_as_those_of_any_engine(ranks):
    (losses, said, first), (same, silent, last) = ranks(2).run(_train)
    assert losses == same == pytest.approx(_alone(), rel=1e-5)
    line = r"step 2: loss ([\d.]+), lr 0\.1, [\d.e+]+ samples/s, [\d.e+]+ MiB peak\n"
    assert float(re.fullmatch(line, said)[1]) == pytest.approx(losses[1], rel=1e-3) and not silent
    assert first == ["module.0.weight", "module.0.bias"] and last == ["module.2.weight", "module.2.bias"]


def _refusals() -> None:
    engine = _engine()
    loss = torch.ones((), requires_grad=True)
    for call in (
        lambda: engine(torch.ones(2, 4)),
        lambda: engine.backward(loss),
        engine.step,
        lambda: engine.no_sync().__enter__(),
    ):
        with pytest.raises(dsgraph.EngineError, match=r"is not supported with pipeline stages.*train_batch"):
            call()
    with pytest.raises(dsgraph.EngineError, match="no data: pass an iterator"):
        engine.train_batch()
    ended = "the iterator ended after micro-batch 1 of 2"
    with pytest.raises(dsgraph.EngineError, match=rf"^train_batch: {ended}\. The step was dropped"):
        engine.train_batch(iter(_batches(1)))
    with pytest.raises(dsgraph.EngineError, match=rf"^eval_batch: {ended}\. They were not evaluated"):
        engine.eval_batch(iter(_batches(1)))
    for call in (lambda: engine.export("weights"), lambda: engine.load_pretrained("weights")):
        with pytest.raises(CheckpointError, match="is not supported with pipeline stages"):
            call()


def test_what_only_a_program_can_do_is_refused(ranks):
    ranks(2).run(_refusals)


_ONE = {**CONFIG, "parallel": {"pp": 1}}
"""The section on one rank, without messages."""


def _drop_other_gradients() -> None:
    def of_the_first_layer(groups):
        return torch.optim.SGD(groups[0]["params"][:2], lr=0.0)

    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    engine, *_ = dsgraph.initialize(
        model=_model(), optimizer=of_the_first_layer, config=config, example=(torch.ones(2, 4),)
    )
    norms = []
    for _ in range(2):
        engine.train_batch(iter(_batches(2)))
        norms.append(engine.get_global_grad_norm())
        assert all(param.grad is None for _, param in engine.named_parameters())
    assert norms[0] == norms[1], "the same batches and parameters"
    for param in engine.module.parameters():
        param.grad = torch.ones_like(param)
    engine.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in engine.module.parameters())
    engine.zero_grad()
    assert all(param.grad is None for _, param in engine.named_parameters())


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).square() * weights).mean() * scale


def _weighted() -> None:
    torch.manual_seed(0)
    model = _Weighted()
    alone, scale = copy.deepcopy(model), torch.tensor(3.0)
    batches = [(x, torch.rand(4, generator=torch.Generator().manual_seed(2)) * x[0], scale) for x in _batches(2)]
    engine, *_ = dsgraph.initialize(model=model, config=CONFIG, example=batches[0])
    wanted = sum(float(alone(*batch).detach()) for batch in batches) / 2
    assert float(engine.eval_batch(iter(batches))) == pytest.approx(wanted, rel=1e-6)
    assert float(engine.train_batch(iter(batches))) == pytest.approx(wanted, rel=1e-6)
    batches[1] = (*batches[1][:2], torch.tensor(2.0))
    with pytest.raises(dsgraph.EngineError, match=r"contain tensor\(3\.\) and, in number 1, tensor\(2\.\)"):
        engine.train_batch(iter(batches))


def test_micro_batches_have_weights_of_their_own_and_one_scale(ranks):
    ranks(2).run(_weighted)


def test_gradients_that_the_optimizer_does_not_update_are_dropped(ranks):
    ranks(2).run(_drop_other_gradients)


def _refuse_mode_and_state() -> None:
    engine, *_ = dsgraph.initialize(model=_model(), config=CONFIG, example=(torch.ones(2, 4),))
    with pytest.raises(dsgraph.EngineError, match=r"^engine\.load_state_dict is not supported with pipeline stages"):
        engine.load_state_dict({})
    for call in (engine.train, engine.eval):
        with pytest.raises(
            dsgraph.EngineError, match=r"^engine\.\w+ is not supported .*: .*engine\.eval_batch\(data\)"
        ):
            call()
    for call in (engine.half, lambda: engine.to("meta"), lambda: engine.apply(print)):
        with pytest.raises(dsgraph.EngineError, match=r"is not supported with pipeline stages: \w+ .*initialize"):
            call()


def test_the_mode_and_the_state_of_the_model_are_not_set_through_the_engine(ranks):
    ranks(2).run(_refuse_mode_and_state)


def test_a_batch_is_evaluated_as_in_eval(one_rank):
    model, batches = nn.Sequential(_model(), nn.Dropout(0.5), _Mean()), _batches(2)
    expected = sum(copy.deepcopy(model).eval()(batch) for batch in batches) / 2
    engine, *_ = dsgraph.initialize(model=model, config=_ONE, example=(torch.ones(2, 4),))
    assert float(engine.eval_batch(iter(batches))) == pytest.approx(expected.item(), rel=1e-6)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x).square().mean(), self.linear(x)


def test_logits_are_those_of_all_micro_batches(one_rank):
    torch.manual_seed(0)
    model, batches = _Pair(), _batches(2)
    expected = [copy.deepcopy(model)(batch) for batch in batches]
    engine, *_ = dsgraph.initialize(model=model, config=_ONE, example=(torch.ones(2, 4),))
    loss, output = engine.eval_batch(iter(batches), return_logits=True)
    assert float(loss) == pytest.approx(sum(each[0].item() for each in expected) / 2, rel=1e-6)
    assert torch.equal(output[0], loss) and torch.equal(output[1], torch.cat([each[1] for each in expected]))


def test_without_stages_logits_are_those_of_a_micro_batch(one_rank):
    config = {key: value for key, value in _ONE.items() if key != "parallel"}
    engine, *_ = dsgraph.initialize(model=_Pair(), config=config)
    loss, output = engine.eval_batch(iter(_batches(1)), return_logits=True)
    assert loss is output[0] and output[1].shape == (2, 4)


def test_auto_does_not_make_a_section_parallel(one_rank):
    config = {**CONFIG, "parallel": {"dp": "auto"}, "memory_breakdown": True}
    engine, *_ = dsgraph.initialize(model=_model(), config=config)
    assert isinstance(engine.module, nn.Module) and not engine.config.is_parallel


def _in_float16(parallel: dict[str, int] | None) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return losses and loss scales of steps, of which the first overflow, and this rank's parameters."""
    config = {**CONFIG, "fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}}
    config = {**config, "parallel": parallel} if parallel else {k: v for k, v in config.items() if k != "parallel"}
    given = {"example": (torch.ones(2, 4),)} if parallel else {}
    engine, *_ = dsgraph.initialize(model=_model(), config=config, **given)
    data = iter(_batches(16))
    losses, scales = [], []
    for _ in range(8):
        losses.append(float(engine.train_batch(data)))
        scales.append(engine.loss_scale)
    assert 0 < engine.skipped_steps < 8 and engine.get_global_grad_norm() > 0
    tensors = (
        engine.module.full_parameters()
        if parallel
        else {name: param.full_tensor().detach() for name, param in engine.module.named_parameters()}
    )
    return losses, scales, tensors


def test_float16_skips_the_steps_that_one_process_skips(ranks, one_rank):
    losses, scales, whole = _in_float16(None)
    for mine, own_scales, held in ranks(2).run(_in_float16, {"pp": 2}):
        assert own_scales == scales and mine == pytest.approx(losses, rel=1e-3)
        assert held and all(torch.allclose(value, whole[name], atol=1e-4) for name, value in held.items())


def _with(sections: dict[str, Any], folder: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, float]]:
    config = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}, **sections}
    config["zero_optimization"] = json.loads(json.dumps(config.get("zero_optimization", {})).replace("FOLDER", folder))
    engine, *_ = dsgraph.initialize(model=_model(), config=config, example=(torch.ones(2, 4),))
    data = iter(_batches(12))
    losses = [float(engine.train_batch(data)) for _ in range(6)]
    held, times = engine.module.full_parameters(), engine.timings()
    engine.close()
    return losses, held, times


_OFFLOADED = {"offload_optimizer": {"device": "nvme", "nvme_path": "FOLDER"}}


@pytest.mark.parametrize(
    ("sections", "count"),
    [
        ({"zero_optimization": _OFFLOADED}, 2),
        pytest.param(
            {"zero_optimization": {"stage": 1, **_OFFLOADED}, "parallel": {"pp": 2, "dp": 2}}, 4, marks=pytest.mark.full
        ),
        ({"communication_data_type": "fp32"}, 2),
    ],
)
def test_sections_that_change_no_number(ranks, tmp_path, sections, count):
    plain = {"parallel": sections["parallel"]} if "parallel" in sections else {}
    expected = ranks(count).run(_with, plain, str(tmp_path))
    for (losses, held, _), (wanted, whole, _) in zip(
        ranks(count).run(_with, sections, str(tmp_path)), expected, strict=True
    ):
        assert losses == wanted and all(torch.equal(value, whole[name]) for name, value in held.items())


def test_steps_are_timed_and_written_to_files(ranks, tmp_path):
    file = tmp_path / "scalars.jsonl"
    asked = {"wall_clock_breakdown": True, "dsgraph": {"compile": False, "metrics_file": str(file)}}
    (losses, _, times), _ = ranks(2).run(_with, asked, str(tmp_path))
    assert set(times) == {"schedule", "step"} and min(times.values()) > 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["Train/Samples/train_loss"] for line in lines] == pytest.approx(losses, rel=1e-6)

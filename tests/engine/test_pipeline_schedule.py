"""The engine of a model that the section `parallel` splits into stages."""

from __future__ import annotations

import contextlib
import io
import re

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
        lambda: engine.eval_batch(iter(_batches(1))),
    ):
        with pytest.raises(dsgraph.EngineError, match=r"is not supported with the section parallel.*train_batch"):
            call()
    with pytest.raises(dsgraph.EngineError, match="no data: pass an iterator"):
        engine.train_batch()
    with pytest.raises(dsgraph.EngineError, match="the iterator ended after micro-batch 1 of 2"):
        engine.train_batch(iter(_batches(1)))
    for call in (lambda: engine.export("weights"), lambda: engine.load_pretrained("weights")):
        with pytest.raises(CheckpointError, match="is not supported with the section parallel"):
            call()


def test_what_only_a_program_can_do_is_refused(ranks):
    ranks(2).run(_refusals)


_ONE = {**CONFIG, "parallel": {"pp": 1}}
"""The section on one rank, without messages."""


def test_gradients_that_the_optimizer_does_not_update_are_dropped(one_rank):
    def of_the_first_layer(groups):
        return torch.optim.SGD(groups[0]["params"][:2], lr=0.0)

    config = {key: value for key, value in _ONE.items() if key != "optimizer"}
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


def test_the_mode_and_the_state_of_the_model_are_not_set_through_the_engine(one_rank):
    engine, *_ = dsgraph.initialize(model=_model(), config=_ONE, example=(torch.ones(2, 4),))
    for call in (engine.train, engine.eval, lambda: engine.load_state_dict({})):
        with pytest.raises(dsgraph.EngineError, match=r"^engine\.\w+ is not supported with the section parallel: "):
            call()
    for call in (engine.half, lambda: engine.to("meta"), lambda: engine.apply(print)):
        with pytest.raises(dsgraph.EngineError, match=r"is not supported with the section parallel: \w+ .*initialize"):
            call()
    data = iter(_batches(1))
    with pytest.raises(dsgraph.EngineError, match=r"^engine.eval_batch is not supported"):
        engine.eval_batch(data)
    assert len(list(data)) == 1, "no batch was taken"


def test_auto_does_not_make_a_section_parallel(one_rank):
    config = {**CONFIG, "parallel": {"dp": "auto"}, "memory_breakdown": True}
    engine, *_ = dsgraph.initialize(model=_model(), config=config)
    assert isinstance(engine.module, nn.Module) and not engine.config.is_parallel

"""Modules that hold their parameters in special ways, and ways of using a model besides calling it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dsgraph
from examples.gpt import GPT, GPTConfig
from tests.distributed.training import ATOL, RTOL, compare, full
from tests.models import VOCAB, build, tokens

pytestmark = pytest.mark.distributed


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(7, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out, _ = self.rnn(x.unsqueeze(1))
        return F.mse_loss(self.head(out[:, 0]), y)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.inward, self.outward = nn.Linear(7, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.outward(self.layer(self.inward(x)[:, None])[:, 0]), y)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(7, 6), torch.randn(6, 5)])
        self.named = nn.ParameterDict({"bias": torch.randn(5)})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return F.mse_loss(x + self.named["bias"], y)


def _lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


def _gru() -> nn.Module:
    return Recurrent(nn.GRU)


def _old_weight_norm() -> nn.Module:
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(7, 6)), nn.Tanh(), nn.Linear(6, 5))
    return WithLoss(model)


def _weight_norm() -> nn.Module:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(7, 6)), nn.Tanh(), nn.Linear(6, 5))
    return WithLoss(model)


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)


def _batches(step: int, rank: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, 7, generator=generator), torch.randn(3, 5, generator=generator)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("stage", "codegen"), [(3, "eager"), (3, None), (1, "eager")])
@pytest.mark.parametrize(
    "build_model",
    [_lstm, _gru, Attending, Listed, _old_weight_norm, _weight_norm],
    ids=lambda f: f.__name__,
)
def test_special_modules_match_one_process(ranks, build_model, stage, codegen):
    ranks(2).run(compare, build_model, _batches, stage=stage, codegen=codegen, keep_whole_below=0, steps=2)


def _use_in_many_ways(stage: int) -> None:
    batch = tokens(0, dist.get_rank())
    alone = build("gpt")
    expected = alone(*batch)
    model = dsgraph.partition(build("gpt"), stage=stage, keep_whole_below=0)
    assert repr(model) == repr(alone)
    torch.testing.assert_close(model(*batch), expected)

    twin = copy.deepcopy(model)  # an average of weights, say
    for param in twin.parameters():
        assert isinstance(param, DTensor)
        with torch.no_grad():
            param.mul_(0.5)
    torch.testing.assert_close(model(*batch), expected)
    with torch.no_grad():
        for param in alone.parameters():
            param.mul_(0.5)
    torch.testing.assert_close(twin(*batch), alone(*batch))
    torch.testing.assert_close(
        torch.compile(twin, backend="dsgraph", options={"codegen": "eager"})(*batch), alone(*batch)
    )

    given = {name: full(param) for name, param in twin.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(model, given, batch), alone(*batch))

    model.load_state_dict(twin.state_dict())
    torch.testing.assert_close(model(*batch), alone(*batch))
    model.load_state_dict({k: v.clone() * 2 for k, v in twin.state_dict().items()}, assign=True)
    torch.testing.assert_close(model(*batch), expected)


@pytest.mark.parametrize(
    "stage", (pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full), 3)
)
def test_copies_functional_calls_and_loading(ranks, stage):
    ranks(2).run(_use_in_many_ways, stage)


def _notice_updates(stage: int, codegen: str | None) -> None:
    """After any kind of update, with or without an evaluation in between, forward sees the new parameters."""
    rank = dist.get_rank()
    for evaluate_in_between in (False, True):
        model = dsgraph.partition(build("small"), stage=stage, keep_whole_below=0)
        runs = model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        alone = build("small")
        updates = (_fused_step, _update_data, _update_in_place, _step_without_backward, _fused_step)
        for step, update in enumerate(updates):
            runs(*tokens(step, rank)).backward()
            if evaluate_in_between:
                with torch.no_grad():
                    runs(*tokens(step, rank))
            update(model, optimizer)
            optimizer.zero_grad()
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                    theirs.copy_(full(mine))
                torch.testing.assert_close(runs(*tokens(9, rank)), alone(*tokens(9, rank)), rtol=RTOL, atol=ATOL)


def _fused_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _update_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.data.add_(param.grad, alpha=-0.1)


def _update_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)


def _step_without_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    runs_before = tokens(3, dist.get_rank())
    with torch.no_grad():
        model(*runs_before)  # the gathered copies are fresh and no gradient is at hand
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.covering(1)
@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize("stage", (1, 2))
def test_copies_follow_updates(ranks, stage, codegen):
    ranks(2).run(_notice_updates, stage, codegen)


def _interleave(stage: int) -> None:
    """Backward passes in another order than the forwards, and two forwards for one backward."""
    rank = dist.get_rank()
    model = dsgraph.partition(build("small"), stage=stage, keep_whole_below=0)
    runs = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    alone = build("small")
    for f in (runs, alone):
        first, second = f(*tokens(0, rank)), f(*tokens(1, rank))
        first.backward()
        third = f(*tokens(2, rank))
        second.backward()
        (third + f(*tokens(3, rank))).backward()
    for theirs in alone.parameters():
        dist.all_reduce(theirs.grad)
        theirs.grad /= dist.get_world_size()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), theirs.grad, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("stage", (pytest.param(1, marks=pytest.mark.full), 3))
def test_backwards_in_any_order(ranks, stage):
    ranks(2).run(_interleave, stage)


def _compile_regionally() -> None:
    model = dsgraph.partition(GPT(GPTConfig(vocab=VOCAB, width=16, heads=2, layers=12)), stage=3, keep_whole_below=0)
    torch._dynamo.utils.counters.clear()
    for block in model.blocks:
        block.compile(backend="dsgraph", options={"codegen": "eager"})
    model(*tokens(0, dist.get_rank())).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "equal layers share one graph"


def test_regional_compilation_compiles_equal_layers_once(ranks):
    ranks(2).run(_compile_regionally)


def _clip() -> None:
    rank = dist.get_rank()
    model, alone = dsgraph.partition(build("tied"), stage=3, keep_whole_below=20), build("tied")
    model(*tokens(0, rank)).backward()
    alone(*tokens(0, rank)).backward()
    for theirs in alone.parameters():
        dist.all_reduce(theirs.grad)
        theirs.grad /= dist.get_world_size()
    mine = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    theirs = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    torch.testing.assert_close(full(mine), theirs)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(a.grad), b.grad)


def test_gradient_clipping(ranks):
    ranks(2).run(_clip)

"""`PipelinedModel.evaluate` on gloo ranks against the unsplit model in `eval()`."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dsgraph
from tests.models import VOCAB

pytestmark = pytest.mark.distributed

COUNT, ROWS, TIME = 4, 2, 8


class Drops(nn.Module):
    """A tied model whose forward in `eval()` is another one: no dropout, no noise, one layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB, bias=False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("positions", torch.linspace(0, 1, TIME).unsqueeze(-1))
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = first = self.embedding(x) + self.positions
        for layer in self.layers:
            if self.training:
                h = h * torch.rand_like(h)
            h = h + self.dropout(torch.tanh(layer(h)))
        return F.cross_entropy(self.head(h if self.training else h + first).flatten(0, 1), y.flatten())


class Outputs(nn.Module):
    """A model without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _tokens(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(0, VOCAB, (2, COUNT * ROWS, TIME), generator=generator)
    return x, y


def _losses(schedule: str, options: dict[str, Any] | None, zero_stage: int, ranks: int) -> float:
    """Evaluate before, between and after steps. Return the largest difference from the model in `eval()`."""
    torch.manual_seed(0)
    model, alone = Drops(), Drops()
    alone.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "dp"))
    x, y = _tokens(0)
    piped = dsgraph.pipeline(
        *(model, mesh["pp"], (x[:ROWS], y[:ROWS])),
        schedule=schedule,
        microbatches=COUNT,
        options=options,
        data_parallel=mesh["dp"] if ranks > 2 else None,
        zero_stage=zero_stage,
    )
    optimizer = torch.optim.SGD(piped.parameters(), lr=0.1)
    worst = 0.0
    for step in range(3):
        loss, batch = piped.evaluate(*_tokens(10 + step)), _tokens(10 + step)
        _take_values(alone, piped)
        with torch.no_grad():
            worst = max(worst, float((loss - alone.eval()(*batch)).abs()))
        piped.step(*_tokens(step))
        before = {name: copy.deepcopy(param.grad) for name, param in piped.named_parameters()}
        piped.evaluate(*batch)
        assert all(torch.equal(param.grad, before[name]) for name, param in piped.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    return worst


def _take_values(model: nn.Module, piped: Any) -> None:
    """Load the parameters of all stages."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, piped.full_parameters())
    model.load_state_dict({name: value for part in parts for name, value in part.items()}, strict=False)


@pytest.mark.parametrize(
    ("schedule", "options", "zero_stage", "count"),
    [
        ("1F1B", None, 0, 2),
        ("ZBVZeroBubble", None, 0, 2),
        pytest.param("GPipe", {"codegen": "eager"}, 0, 2, marks=pytest.mark.full),
        pytest.param("Interleaved1F1B", None, 0, 2, marks=pytest.mark.full),
        pytest.param("1F1B", None, 1, 4, marks=pytest.mark.full),
        pytest.param("1F1B", None, 3, 4, marks=pytest.mark.full),
    ],
)
def test_the_loss_is_that_of_the_model_in_eval(ranks, schedule, options, zero_stage, count):
    assert max(ranks(count).run(_losses, schedule, options, zero_stage, count)) <= 1e-5


def _with_a_loss_outside() -> float:
    torch.manual_seed(0)
    model = Outputs()
    alone = copy.deepcopy(model).eval()
    x, y = torch.randn(2, COUNT * ROWS, 4)
    piped = dsgraph.pipeline(model, init_device_mesh("cpu", (2,)), (x[:ROWS],), microbatches=COUNT, loss_fn=F.mse_loss)
    with pytest.raises(dsgraph.OptionError, match=r"pipeline\.evaluate: loss_fn needs target="):
        piped.evaluate(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        low, expected = piped.evaluate(x, target=y), F.mse_loss(alone(x), y)
    assert abs(low - expected) < 1e-2
    return float((piped.evaluate(x, target=y) - F.mse_loss(alone(x), y)).abs())


def test_loss_fn_and_autocast_hold_as_in_a_step(ranks):
    assert max(ranks(2).run(_with_a_loss_outside)) <= 1e-6


class _Scaled(nn.Module):
    """A block with a small buffer, which each stage that reads it computes with."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 0.1 * number))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale.exp()


class _Odd(nn.Module):
    """Makes tensors with and without a device, asks for that of its input; may hold what cannot be copied."""

    def __init__(self, lock: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Scaled(number) for number in range(4))
        self.lock = threading.Lock() if lock else None

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training), torch.autocast(x.device.type, enabled=False):
            for layer in self.layers:
                x = layer(x) + torch.arange(4) * torch.tensor([0.5] * 4).to(x.dtype)
                x = x - torch.ones(4, device="cpu") if x.device.type == "cpu" else 2 * x
        return x.square().mean()


def _one_rank() -> Any:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]


def _odd_models() -> float:
    torch.manual_seed(0)
    x, mesh = torch.randn(COUNT * ROWS, 4), init_device_mesh("cpu", (2,))
    locked = dsgraph.pipeline(_Odd(lock=True), mesh, (x[:ROWS],), microbatches=COUNT)
    assert locked.step(x).isfinite()
    with pytest.raises(dsgraph.PartitionError, match=r"_Odd cannot be copied, which evaluate, param_dtype"):
        locked.evaluate(x)
    torch.manual_seed(0)
    model = _Odd(lock=False)
    alone = copy.deepcopy(model)
    piped = dsgraph.pipeline(model, mesh, (x[:ROWS],), microbatches=COUNT)
    with torch.inference_mode():  # around an evaluation, as users write it
        worst = float((piped.evaluate(x) - alone(x)).abs())
    low = dsgraph.pipeline(
        copy.deepcopy(alone),
        mesh,
        (x[:ROWS],),
        microbatches=COUNT,
        data_parallel=_one_rank(),
        param_dtype=torch.float64,
    )
    return max(worst, float((low.step(x) - alone(x)).abs()))


def test_what_a_copy_of_the_model_may_meet(ranks):
    assert max(ranks(2).run(_odd_models)) <= 1e-6

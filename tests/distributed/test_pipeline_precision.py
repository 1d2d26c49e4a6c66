"""`pipeline(param_dtype=...)` and the engine's sections bf16 and fp16 with stages, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import dsgraph
from examples.gpt import GPT, GPTConfig
from tests.models import VOCAB

pytestmark = pytest.mark.distributed

COUNT, ROWS, TIME = 4, 2, 8


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=VOCAB, width=16, heads=2, layers=4))


def _tokens(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(0, VOCAB, (2, COUNT * ROWS, TIME), generator=generator)
    return x, y


class Alone:
    """One process: masters in float32, a forward with lower parameters, gradients added up in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model, self._dtype = _model(), dtype
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x: Tensor, y: Tensor) -> float:
        masters, total = dict(self.model.named_parameters()), 0.0
        for rows, targets in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True):
            low = {name: param.detach().to(self._dtype).requires_grad_() for name, param in masters.items()}
            loss = functional_call(self.model, low, (rows, targets)) / COUNT
            loss.backward()
            total += float(loss)
            for name, param in masters.items():
                grad = low[name].grad.float()
                param.grad = grad if param.grad is None else param.grad + grad
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor) -> float:
        low = {name: param.to(self._dtype) for name, param in self.model.named_parameters()}
        parts = zip(x.chunk(COUNT), y.chunk(COUNT), strict=True)
        return sum(float(functional_call(self.model, low, part) / COUNT) for part in parts)


def _steps(schedule: str, options: dict[str, Any] | None, zero_stage: int, ranks: int) -> tuple[float, set[Any]]:
    """Return the largest difference of a loss or parameter, and the dtypes of parameters and gradients."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "dp"))
    x, y = _tokens(0)
    piped = dsgraph.pipeline(
        *(_model(), mesh["pp"], (x[:ROWS], y[:ROWS])),
        schedule=schedule,
        microbatches=COUNT,
        options=options,
        data_parallel=mesh["dp"],
        zero_stage=zero_stage,
        keep_whole_below=64,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    alone = Alone(torch.bfloat16)
    optimizer = torch.optim.SGD(piped.parameters(), lr=0.1)
    worst, dtypes = 0.0, set()
    for step in range(3):
        loss = piped.step(*_tokens(step))
        dtypes |= {(param.dtype, param.grad.dtype) for param in piped.parameters()}
        worst = max(worst, abs(float(loss) - alone.step(*_tokens(step))))
        optimizer.step()
        optimizer.zero_grad()
        mine, expected = piped.full_parameters(), dict(alone.model.named_parameters())
        worst = max([worst, *(float((value - expected[name]).abs().max()) for name, value in mine.items())])
    return max(worst, abs(float(piped.evaluate(x, y)) - alone.evaluate(x, y))), dtypes


@pytest.mark.parametrize(
    ("schedule", "options", "zero_stage", "count"),
    [
        ("1F1B", None, 0, 2),
        ("ZBVZeroBubble", None, 1, 2),
        pytest.param("1F1B", {"codegen": "eager"}, 1, 4, marks=pytest.mark.full),
        pytest.param("GPipe", None, 2, 4, marks=pytest.mark.full),
        pytest.param("1F1B", None, 3, 4, marks=pytest.mark.full),
    ],
)
def test_steps_in_bfloat16_are_those_of_one_process(ranks, schedule, options, zero_stage, count):
    for worst, dtypes in ranks(count).run(_steps, schedule, options, zero_stage, count):
        assert worst <= 1e-6 and dtypes == {(torch.float32, torch.float32)}

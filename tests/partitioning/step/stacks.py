"""A stack of equal blocks whose calls a test chooses."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.partitioning.state import partition_states
from dsgraph.partitioning.step.step_run import StepRun

WIDTH = 8
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Block(nn.Module):
    """A linear layer and a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


class Stack(nn.Module):
    """Blocks that are called in a given order.

    Attributes:
        order: Numbers of the blocks that a forward calls; -1: it raises an error; -2: its backward does.
    """

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.order: Sequence[int] = range(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            if number == -1:
                raise ValueError("in the forward")
            if number == -2:
                x.register_hook(_fail)
            else:
                x = self.blocks[number](x)
        return x


def _fail(_: Tensor) -> None:
    raise ValueError("in the backward")


def partitioned(model: nn.Module, **options: Any) -> tuple[Any, StepRun]:
    """Return a compiled model of stage 3 whose small parameters are sharded as well, and its steps."""
    dsgraph.partition(model, keep_whole_below=0, blocks="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", **options})
    (state,) = partition_states(model)
    return compiled, state.step


class Twins:
    """A partitioned compiled stack, and an equal one that is neither, in training.

    Attributes:
        models: The plain stack, and the other one.
        compiled: The latter, compiled.
        steps: Its steps.
    """

    def __init__(self, blocks: int = 4) -> None:
        torch.manual_seed(0)
        plain = Stack(blocks)
        model = copy.deepcopy(plain)
        self.compiled, self.steps = partitioned(model)
        self.models = (plain, model)
        self._optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in self.models]

    def forward(self, *order: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the losses of both, and check that they are equal."""
        for model in self.models:
            model.order = order
        x = torch.linspace(-1, 1, 2 * WIDTH, dtype=dtype).view(2, WIDTH)
        plain, loss = (run(x).square().sum() for run in (self.models[0], self.compiled))
        torch.testing.assert_close(loss, plain)
        return plain, loss

    def update(self) -> None:
        """Compare the gradients, and update."""
        for mine, theirs in zip(*(model.parameters() for model in self.models), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(theirs.grad.to_local(), mine.grad)
        for optimizer in self._optimizers:
            optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def train(self, *order: int, **how: Any) -> None:
        """Run a step, and compare losses and gradients."""
        for loss in self.forward(*order, **how):
            loss.backward()
        self.update()

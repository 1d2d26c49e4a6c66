"""Random steps: any order of blocks, errors anywhere, several forwards, backwards and micro-batches.

Each step leaves the record of the one before or follows it, as it comes. All ranks get the same batch, so that the
numbers are those of a plain model in one process.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import dsgraph
from tests.partitioning.step.stacks import WIDTH, Stack

pytestmark = pytest.mark.distributed

_FORMS = [(3, True), (3, False), (1, False), (0, False)]
_FAILS_FORWARD, _FAILS_BACKWARD = -1, -2  # see `Stack`


class _Pair:
    """A plain model and an equal partitioned one.

    Attributes:
        draw: Draws orders.
        model: The partitioned model.
    """

    def __init__(self, seed: int, stage: int, compiles: bool) -> None:
        torch._dynamo.reset()
        torch.manual_seed(seed)
        self.draw, plain = random.Random(seed), Stack().double()  # sums in another order differ less
        self.model = dsgraph.partition(copy.deepcopy(plain), stage=stage, keep_whole_below=0, blocks="auto")
        compiled = torch.compile(self.model, backend="dsgraph", options={"codegen": "eager"})
        self._models = (plain, self.model)
        self._runs = (plain, compiled if compiles else self.model)
        self._optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in self._models]
        self._orders = [self._new_order() for _ in range(4)]
        self._calls = 0

    def _new_order(self) -> list[int]:
        return [self.draw.randrange(4) for _ in range(self.draw.randint(1, 6))]

    def order(self) -> list[int]:
        """Return an order that has been before, or a new one."""
        return list(self.draw.choice(self._orders)) if self.draw.random() < 0.7 else self._new_order()

    def forward(self, order: list[int]) -> tuple[Tensor, ...]:
        """Return the losses of both, which are equal."""
        self._calls += 1
        x = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH) * (1 + self._calls % 7)
        for model in self._models:
            model.order = order
        losses = tuple(run(x).square().sum() for run in self._runs)
        torch.testing.assert_close(losses[1], losses[0])
        return losses

    def fails(self, order: list[int], *, backward: bool) -> None:
        """Run both, which raise the same error."""
        for model, run in zip(self._models, self._runs, strict=True):
            model.order = order
            with pytest.raises(ValueError, match="in the backward" if backward else "in the forward"):
                run(torch.ones(2, WIDTH, dtype=torch.float64)).square().sum().backward()
        if backward:
            self.drop()

    def freeze(self, number: int) -> None:
        """Freeze a block of both, or train it again."""
        for model in self._models:
            block = model.blocks[number]
            block.requires_grad_(not all(param.requires_grad for param in block.parameters()))

    def update(self) -> None:
        """Compare the gradients, and update."""
        for mine, theirs in zip(*(model.parameters() for model in self._models), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(theirs.grad.full_tensor(), mine.grad)
        for optimizer in self._optimizers:
            optimizer.step()
        self.drop()

    def drop(self) -> None:
        """Forget the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def _backward(losses: tuple[Tensor, ...]) -> None:
    for loss in losses:
        if loss.requires_grad:
            loss.backward()


def _train(pair: _Pair) -> None:
    _backward(pair.forward(pair.order()))


def _two_forwards(pair: _Pair) -> None:
    first, second = pair.forward(pair.order()), pair.forward(pair.order())
    _backward(tuple(a + b for a, b in zip(first, second, strict=True)))


def _two_backwards(pair: _Pair) -> None:
    losses = pair.forward(pair.order())
    for loss in losses:
        if loss.requires_grad:
            loss.backward(retain_graph=True)
    _backward(losses)


def _micro_batches(pair: _Pair) -> None:
    count = pair.draw.randint(2, 3)
    for number in range(count):
        with nullcontext() if number == count - 1 else dsgraph.accumulate(pair.model):
            _train(pair)


def _forward_alone(pair: _Pair) -> None:
    pair.forward(pair.order())


def _evaluate(pair: _Pair) -> None:
    with torch.no_grad() if pair.draw.random() < 0.5 else torch.inference_mode():
        pair.forward(pair.order())


def _fail_in_the_forward(pair: _Pair) -> None:
    order = pair.order()
    pair.fails([*order[: pair.draw.randint(0, len(order))], _FAILS_FORWARD, *order], backward=False)


def _fail_in_the_backward(pair: _Pair) -> None:
    order = pair.order()
    place = pair.draw.randint(1, len(order))
    if all(param.requires_grad for param in pair.model.blocks[order[0]].parameters()):
        pair.fails([*order[:place], _FAILS_BACKWARD, *order[place:]], backward=True)


def _freeze(pair: _Pair) -> None:
    pair.freeze(pair.draw.randrange(4))


_WAYS: tuple[Callable[[_Pair], None], ...] = (
    *(_train, _train, _train, _two_forwards, _two_backwards, _micro_batches, _forward_alone, _evaluate),
    *(_fail_in_the_forward, _fail_in_the_backward, _freeze),
)


def _play(seed: int, count: int, stage: int, compiles: bool) -> None:
    pair = _Pair(seed, stage, compiles)
    for _ in range(count):
        pair.draw.choice(_WAYS)(pair)
        pair.update()


@pytest.mark.parametrize(("stage", "compiles"), _FORMS)
def test_random_steps_have_the_numbers_of_one_process(ranks, stage, compiles):
    ranks(2).run(_play, stage, 30, stage, compiles)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("stage", "compiles"), _FORMS)
@pytest.mark.parametrize("seed", range(10, 15))
def test_1000_random_steps(ranks, seed, stage, compiles):
    ranks(2).run(_play, seed, 50, stage, compiles)

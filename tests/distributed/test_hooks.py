"""Hooks of parameters in a step of micro-batches, and steps that are given up before their last backward."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph
from tests.distributed.training import full

pytestmark = pytest.mark.distributed

REDUCING_ONCE = ((0, None), (1, None), (2, True))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor, with_head: bool) -> Tensor:
        y = self.body(x).tanh()
        return (self.head(y) if with_head else y).square().sum()


def _batch(number: int, rank: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def _models(stage: int, codegen: str | None) -> tuple[nn.Module, nn.Module, Callable[..., Tensor]]:
    """A plain model, the same partitioned, and what to call for the latter."""
    torch.manual_seed(0)
    plain = Net()
    model = dsgraph.partition(copy.deepcopy(plain), stage=stage, keep_whole_below=0)
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    return plain, model, runs


def _backward_of_all_ranks(plain: nn.Module, number: int, with_head: bool) -> None:
    """Compute the sum of the partitioned model's backwards on all ranks."""
    for rank in range(dist.get_world_size()):
        (plain(_batch(number, rank), with_head) / dist.get_world_size()).backward()


def _step_in_backward(stage: int, reduce_once: bool | None, codegen: str | None) -> None:
    """Each parameter has a hook and an optimizer of its own, which steps as soon as its gradient is complete."""
    plain, model, runs = _models(stage, codegen)
    calls: Counter[str] = Counter()
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    def watch(name: str, param: nn.Parameter) -> None:
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)

        def doubled(grad: Tensor) -> Tensor:
            calls[f"{name} before"] += 1
            return 2 * grad

        def step(_: Tensor) -> None:
            calls[f"{name} after"] += 1
            optimizer.step()
            optimizer.zero_grad()

        param.register_hook(doubled)
        param.register_post_accumulate_grad_hook(step)

    for name, param in model.named_parameters():
        watch(name, param)
    for number in range(2):
        calls.clear()
        with dsgraph.accumulate(model, reduce_once=reduce_once):
            runs(_batch(2 * number, dist.get_rank()), True).backward()
        assert not calls
        runs(_batch(2 * number + 1, dist.get_rank()), False).backward()  # which leaves the head out
        assert sorted(calls.values()) == [1] * 8, calls
        for micro in range(2):
            _backward_of_all_ranks(plain, 2 * number + micro, with_head=not micro)
        for param in plain.parameters():
            param.grad.mul_(2)
        expected.step()
        expected.zero_grad()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(mine), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize(("stage", "reduce_once"), REDUCING_ONCE)
def test_hooks_are_called_once_a_step_with_the_whole_gradient(ranks, stage, reduce_once, codegen):
    ranks(2).run(_step_in_backward, stage, reduce_once, codegen)


def _drop_none(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()


def _drop_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def _drop_head(model: nn.Module) -> None:
    model.head.zero_grad()


def _drop_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def _interrupted(loss: Tensor, param: nn.Parameter) -> None:
    """A backward that ends when the gradient of `param` is there."""

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    handle = param.register_hook(interrupt)
    with suppress(KeyboardInterrupt):
        loss.backward()
    handle.remove()


def _give_up(stage: int, reduce_once: bool | None, codegen: str | None) -> None:
    plain, model, runs = _models(stage, codegen)
    rank = dist.get_rank()
    for number, drop in enumerate((_drop_none, _drop_in_place, _drop_head, _drop_by_hand)):
        with dsgraph.accumulate(model, reduce_once=reduce_once):
            runs(100 * _batch(number, rank), True).backward()
        for other in range(2):
            (plain(100 * _batch(number, other), True) / 2).backward()
        if drop in (_drop_none, _drop_by_hand):
            # All of it goes, and what the backward has not reached has no gradient in one process.
            _interrupted(runs(_batch(20, rank), True), dict(model.named_parameters())["body.weight"])
        for given_up in (model, plain):
            drop(given_up)
        with dsgraph.accumulate(model, reduce_once=reduce_once):
            runs(_batch(30 + number, rank), True).backward()
        runs(_batch(40 + number, rank), False).backward()
        _backward_of_all_ranks(plain, 30 + number, True)
        _backward_of_all_ranks(plain, 40 + number, False)
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(mine.grad), theirs.grad, rtol=1e-5, atol=1e-5, msg=f"{drop}: {name}")
        _drop_none(model)
        _drop_none(plain)
    with dsgraph.accumulate(model, reduce_once=reduce_once):
        runs(100 * _batch(50, rank), True).backward()
    loss = runs(_batch(51, rank), True)
    _drop_none(model)  # between the last forward and its backward: that backward alone counts
    loss.backward()
    _backward_of_all_ranks(plain, 51, True)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), theirs.grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize(("stage", "reduce_once"), REDUCING_ONCE)
def test_zero_grad_drops_the_sums_of_a_step_that_was_given_up(ranks, stage, reduce_once, codegen):
    ranks(2).run(_give_up, stage, reduce_once, codegen)


def _clip_too_early() -> None:
    _, model, runs = _models(0, None)
    with dsgraph.accumulate(model):
        runs(_batch(0, dist.get_rank()), True).backward()
    weight = dict(model.named_parameters())["head.bias"]
    assert weight.grad.to_local().isnan().all()  # no number could be right before gradients are reduced
    copied = copy.deepcopy(model)
    assert all(param.grad is None for param in copied.parameters())
    early = r"the gradient of parameter '{}' would be written to inside a step"
    with pytest.raises(dsgraph.AccumulationError, match=early.format(r"head\.bias")):
        weight.grad.fill_(1.0)
    with pytest.raises(dsgraph.AccumulationError, match=early.format(r"body\.weight")):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    runs(_batch(1, dist.get_rank()), True).backward()  # nothing was changed
    assert weight.grad.to_local().isfinite().all()


def test_a_gradient_that_is_not_reduced_yet_cannot_be_read_or_written(ranks):
    ranks(2).run(_clip_too_early)

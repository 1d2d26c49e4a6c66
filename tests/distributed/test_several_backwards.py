"""Steps of micro-batches with several backwards, also one inside another, and with `torch.autograd.grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsgraph
from tests.distributed.training import full

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.mid, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, part: str = "all") -> Tensor:
        if part == "head":
            return self.head(x)
        hidden = torch.tanh(self.mid(torch.tanh(self.body(x))))
        return hidden if part == "hidden" else self.head(hidden)


class ByTiles(torch.autograd.Function):
    """A loss of rows that runs backward tile by tile, in its forward or in its own backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Callable[[Tensor], Tensor], ahead: bool) -> Tensor:
        tiles = [tile.detach().requires_grad_() for tile in hidden.chunk(2)]
        with torch.enable_grad():
            losses = [head(tile).square().sum() for tile in tiles]
        ctx.tiles, ctx.losses = tiles, losses
        if ahead:
            for loss in losses:
                loss.backward()
            ctx.losses = []
        return sum(loss.detach() for loss in losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for loss in ctx.losses:
            loss.backward()
        return torch.cat([tile.grad for tile in ctx.tiles]) * grad, None, None


def two_losses(net: Any, model: nn.Module, x: Tensor) -> None:
    out = net(x)
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def two_forwards(net: Any, model: nn.Module, x: Tensor) -> None:
    losses = net(x).square().mean(), net(x * 2).abs().mean()
    for loss in losses:
        loss.backward()


def in_turns(net: Any, model: nn.Module, x: Tensor) -> None:
    net(x).square().mean().backward()
    net(x * 2).abs().mean().backward()


def parts_in_turns(net: Any, model: nn.Module, x: Tensor) -> None:
    """The first backward reaches fewer parameters."""
    hidden, out = net(x, "hidden"), net(x * 2)
    hidden.square().mean().backward()
    out.abs().mean().backward()


def reentrant(net: Any, model: nn.Module, x: Tensor) -> None:
    hidden = checkpoint(lambda x: net(x, "hidden"), x.clone().requires_grad_(), use_reentrant=True)
    checkpoint(lambda x: net(x, "head"), hidden, use_reentrant=True).square().mean().backward()


def reentrant_inside(net: Any, model: nn.Module, x: Tensor) -> None:
    def outer(x: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: net(x, "hidden"), x, use_reentrant=True)
        return net(checkpoint(lambda x: net(x, "hidden"), hidden, use_reentrant=True), "head")

    checkpoint(outer, x.clone().requires_grad_(), use_reentrant=True).square().mean().backward()


def tiles_ahead(net: Any, model: nn.Module, x: Tensor) -> None:
    ByTiles.apply(net(x, "hidden"), lambda tile: net(tile, "head"), True).backward()


def tiles(net: Any, model: nn.Module, x: Tensor) -> None:
    ByTiles.apply(net(x, "hidden"), lambda tile: net(tile, "head"), False).backward()


def some_inputs(net: Any, model: nn.Module, x: Tensor) -> None:
    loss = net(x).square().mean()
    params = list(model.parameters())
    loss.backward(inputs=params[2:], retain_graph=True)
    loss.backward(inputs=params[:2])


def one_input(net: Any, model: nn.Module, x: Tensor) -> None:
    """The gradient of the others is dropped."""
    net(x).square().mean().backward(inputs=list(model.parameters())[2:])


def weighted(net: Any, model: nn.Module, x: Tensor) -> None:
    """Weights of losses that balance their gradients."""
    out = net(x)
    losses, last = (out.square().mean(), out.abs().mean()), list(model.parameters())[-2:]
    norms = []
    for loss in losses:
        found = torch.autograd.grad(loss, last, retain_graph=True)
        norms.append(torch.stack([full(each).norm() for each in found]).norm())
    (losses[0] + losses[1] * (norms[0] / norms[1]).detach()).backward()


def penalty(net: Any, model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    out = net(x).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + slope.square().sum()).backward()


def in_a_hook(net: Any, model: nn.Module, x: Tensor) -> None:
    second = net(x * 2).abs().mean()
    hidden = net(x, "hidden")
    hidden.register_hook(lambda grad: second.backward())
    net(hidden, "head").square().mean().backward()


WAYS = (
    *(two_losses, two_forwards, in_turns, parts_in_turns, reentrant, reentrant_inside, tiles_ahead, tiles),
    *(some_inputs, one_input, weighted, penalty, in_a_hook),
)
STEPS = ((0, None), (1, None), (2, True), (2, None), (3, None))


def _batch(micro: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * micro + rank))


def _check(way: Callable[..., None], stage: int, reduce_once: bool | None, codegen: str | None) -> str:
    """Returns what differs from one process, empty if nothing does."""
    rank, world, alone = dist.get_rank(), dist.get_world_size(), Net()
    same = way is weighted  # the norms are those of the mean over ranks, which one batch alone does not know
    for micro in range(3):
        for each in range(world):
            way(alone, alone, _batch(micro, 0 if same else each))
    net = dsgraph.partition(Net(), stage=stage, keep_whole_below=12)
    run = net if codegen is None else torch.compile(net, backend="dsgraph", options={"codegen": codegen})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            with dsgraph.accumulate(net, reduce_once=reduce_once):
                way(run, net, _batch(micro, 0 if same else rank))
        way(run, net, _batch(2, 0 if same else rank))
        for (name, mine), theirs in zip(net.named_parameters(), alone.parameters(), strict=True):
            if (mine.grad is None) != (theirs.grad is None):
                return f"{name} {mine.grad}"
            if theirs.grad is not None and not torch.allclose(full(mine.grad), theirs.grad / world, atol=1e-5):
                return f"{name} {full(mine.grad).norm():.4f} {theirs.grad.norm() / world:.4f}"
        optimizer.step()
    return ""


def _all(ways: list[str], steps: Any, codegens: list[str | None]) -> list[str]:
    found = []
    for name in ways:
        for stage, reduce_once in steps:
            for codegen in codegens:
                torch._dynamo.reset()
                try:
                    wrong = _check(globals()[name], stage, reduce_once, codegen)
                except Exception as error:
                    wrong = f"{type(error).__name__}: {str(error)[:300]}"
                if wrong:
                    found.append(f"{name} {stage} {reduce_once} {codegen}: {wrong}")
    return found


def test_gradients_are_those_of_one_process(ranks):
    assert ranks(2).run(_all, [way.__name__ for way in WAYS], STEPS[1:2], [None]) == [[], []]
    assert ranks(2).run(_all, ["two_forwards", "reentrant"], STEPS[:1], ["eager"]) == [[], []]
    assert ranks(2).run(_all, ["in_a_hook"], STEPS[4:], [None]) == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
def test_gradients_at_every_stage(ranks, way):
    codegens = [None] if way == "penalty" else [None, "eager"]  # torch compiles no second derivatives
    assert ranks(2).run(_all, [way], STEPS, codegens) == [[], []]


def _hooks(way: str, stage: int, reduce_once: bool | None, codegen: str | None) -> list[tuple[int, bool]]:
    """Returns how often hooks of the body's weight were called in a step, and if the last gradient was the average."""
    net, alone = dsgraph.partition(Net(), stage=stage, keep_whole_below=12), Net()
    run = net if codegen is None else torch.compile(net, backend="dsgraph", options={"codegen": codegen})
    for model in (net, alone):
        model.calls = []
        weight = dict(model.named_parameters())["body.weight"]
        weight.register_hook(lambda grad, calls=model.calls: calls.append(full(grad).clone()))
    train = globals()[way]
    for each in range(2):
        for micro in range(2):
            train(alone, alone, _batch(micro, each))
    found = []
    for _ in range(2):
        net.calls.clear()
        with dsgraph.accumulate(net, reduce_once=reduce_once):
            train(run, net, _batch(0, dist.get_rank()))
        train(run, net, _batch(1, dist.get_rank()))
        found.append((len(net.calls), torch.allclose(sum(net.calls), alone.body.weight.grad / 2, atol=1e-5)))
        net.zero_grad()
    return found


@pytest.mark.parametrize("codegen", [None, "eager"])
@pytest.mark.parametrize(
    ("way", "calls"),
    [
        ("reentrant", 1),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("reentrant_inside", 1), ("tiles", 1), ("two_losses", 2))
        ),
    ],
)
@pytest.mark.parametrize(
    ("stage", "reduce_once"),
    [STEPS[1], *(pytest.param(*each, marks=pytest.mark.full) for each in (STEPS[0], STEPS[2]))],
)
def test_hooks_are_called_once_for_backwards_inside_another(ranks, way, calls, stage, reduce_once, codegen):
    assert ranks(2).run(_hooks, way, stage, reduce_once, codegen) == [[(calls, True)] * 2] * 2

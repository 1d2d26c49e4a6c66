"""Writes of code outside any forward to a parameter take effect, in every stage and at every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dsgraph
from tests.distributed.training import ATOL, RTOL, full

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """Two layers, of which `keep_whole_below` keeps the second replicated, and an embedding with a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 7, padding_idx=2)
        self.split = nn.Linear(7, 11)
        self.whole = nn.Linear(11, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.whole(torch.tanh(self.split(self.embedding(x)))), y)


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 9, (4,), generator=generator), torch.randint(0, 5, (4,), generator=generator)


def _build() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.2)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(0, 0.5)
        module.weight.data[module.padding_idx].zero_()


def _layers(model: nn.Module) -> list[nn.Linear]:
    return [model.split, model.whole]


def _each(write: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        for layer in _layers(model):
            write(layer.weight)

    return apply


def _without_gradients(write: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    return torch.no_grad()(_each(write))


def _numbers(like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, like.numel()).view(like.shape)


def _replace_data(weight: Tensor) -> None:
    weight.data = _numbers(weight)


def _assign_row(weight: Tensor) -> None:
    weight.data[3] = 0.25


def _by_rows(weight: Tensor) -> None:
    for number, row in enumerate(weight):
        row.fill_(number)


def _normalize(weight: Tensor) -> None:
    weight /= weight.norm(dim=1, keepdim=True)


def _kept_handles(weight: Tensor) -> None:
    first, second = weight.data, weight.data[1:]
    first.mul_(2)
    second.add_(1)
    first.sub_(0.5)


def _reset(model: nn.Module) -> None:
    for layer in (model.embedding, *_layers(model)):
        layer.reset_parameters()


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "augmented": _without_gradients(_normalize),
    "data_mul": _each(lambda w: w.data.mul_(0.5)),
    "data_clamp": _each(lambda w: w.data.clamp_(-0.1, 0.1)),
    "data_set": _each(_replace_data),
    "data_row": _each(_assign_row),
    "zero": _without_gradients(lambda w: w.zero_()),
    "copy": _without_gradients(lambda w: w.copy_(_numbers(w))),
    "detached": _each(lambda w: w.detach().t().mul_(2)),
    "rows": _without_gradients(_by_rows),
    "handles": _each(_kept_handles),
    "out": _without_gradients(lambda w: torch.mul(_numbers(w), 2, out=w)),
    "foreach": lambda model: torch._foreach_mul_([layer.weight.data for layer in _layers(model)], 0.5),
    "apply": lambda model: model.apply(_init),
    "reset": _reset,
    "normal": _each(lambda w: nn.init.normal_(w)),
    "uniform": _each(lambda w: nn.init.uniform_(w)),
    "constant": _each(lambda w: nn.init.constant_(w, 0.3)),
    "xavier_uniform": _each(lambda w: nn.init.xavier_uniform_(w)),
    "xavier_normal": _each(lambda w: nn.init.xavier_normal_(w)),
    "kaiming_uniform": _each(lambda w: nn.init.kaiming_uniform_(w)),
    "kaiming_normal": _each(lambda w: nn.init.kaiming_normal_(w)),
    "orthogonal": _each(lambda w: nn.init.orthogonal_(w)),
    "sparse": _each(lambda w: nn.init.sparse_(w, 0.4)),
    "eye": _each(lambda w: nn.init.eye_(w)),
    "dirac": _without_gradients(lambda w: nn.init.dirac_(w[:, :, None])),
}


def _write_and_train(stage: int, codegen: str | None) -> None:
    mine, alone = dsgraph.partition(_build(), stage=stage, keep_whole_below=60), _build()
    runs = mine if codegen is None else torch.compile(mine, backend="dsgraph", options={"codegen": codegen})
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, fused=True) for model in (mine, alone)]
    for step, (name, write) in enumerate(WRITES.items()):
        torch.manual_seed(step + dist.get_rank())
        write(mine)
        torch.manual_seed(step)
        write(alone)
        _check(mine, alone, f"after {name}")
        _step(runs, alone, optimizers, step)
        _check(mine, alone, f"after {name} and a step")


def _step(runs: nn.Module, alone: nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    world = dist.get_world_size()
    loss = runs(*_batch(step, dist.get_rank()))
    expected = sum(alone(*_batch(step, rank)) for rank in range(world)) / world
    loss.backward()
    expected.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total / world, expected, rtol=RTOL, atol=ATOL)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _check(mine: nn.Module, alone: nn.Module, where: str) -> None:
    for (name, param), theirs in zip(mine.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(param), theirs, rtol=RTOL, atol=ATOL, msg=lambda m: f"{where}: {name}: {m}")  # noqa: B023


@pytest.mark.covering(1)
@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize("stage", STAGES)
def test_writes_take_effect(ranks, stage, codegen):
    ranks(2).run(_write_and_train, stage, codegen)


def _write_within_a_step(codegen: str | None) -> None:
    """Between two micro-batches, inside `accumulate` and outside."""
    for stage in STAGES:
        mine, alone = dsgraph.partition(_build(), stage=stage, keep_whole_below=60), _build()
        runs = mine if codegen is None else torch.compile(mine, backend="dsgraph", options={"codegen": codegen})
        world, rank = dist.get_world_size(), dist.get_rank()
        for step in range(2):
            with dsgraph.accumulate(mine):
                runs(*_batch(4 * step, rank)).backward()
                _clip(mine)
                runs(*_batch(4 * step + 1, rank)).backward()
                _clip(mine)
            _clip(mine)
            runs(*_batch(4 * step + 2, rank)).backward()
            for number, clips in enumerate((1, 2, 0)):
                (sum(alone(*_batch(4 * step + number, other)) for other in range(world)) / world).backward()
                for _ in range(clips):
                    _clip(alone)
            _check(mine, alone, f"stage {stage}, step {step}")
            for ours, theirs in zip(mine.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=RTOL, atol=ATOL)
            mine.zero_grad()
            alone.zero_grad()


@torch.no_grad()
def _clip(model: nn.Module) -> None:
    for layer in _layers(model):
        layer.weight.clamp_(-0.2, 0.2).mul_(0.7)


@pytest.mark.parametrize("codegen", (None, pytest.param("eager", marks=pytest.mark.full)))
def test_writes_within_a_step(ranks, codegen):
    ranks(2).run(_write_within_a_step, codegen)


def _read_and_write_gradients(codegen: str | None) -> None:
    for stage in STAGES:
        mine, alone = dsgraph.partition(_build(), stage=stage, keep_whole_below=60), _build()
        runs = mine if codegen is None else torch.compile(mine, backend="dsgraph", options={"codegen": codegen})
        assert all(layer.weight.grad is None for layer in _layers(mine))
        hooks = [layer.weight.register_hook(_scale) for model in (mine, alone) for layer in _layers(model)]
        world = dist.get_world_size()
        runs(*_batch(0, dist.get_rank())).backward()
        (sum(alone(*_batch(0, rank)) for rank in range(world)) / world).backward()
        for ours, theirs in zip(_layers(mine), _layers(alone), strict=True):
            torch.testing.assert_close(ours.weight.grad + 0, theirs.weight.grad, rtol=RTOL, atol=ATOL)
            for layer in (ours, theirs):
                layer.weight.grad[1] = 0.5
                layer.weight.grad.mul_(2)
                layer.bias.grad = torch.ones_like(layer.bias)
        for model in (mine, alone):
            torch.nn.utils.clip_grad_norm_([layer.weight for layer in _layers(model)], 0.1)
        for ours, theirs in zip(mine.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=RTOL, atol=ATOL)
        for hook in hooks:
            hook.remove()
        for layer in _layers(mine):
            layer.weight.grad = None
        assert mine.split._parameters["weight"].grad is None


def _scale(grad: Tensor) -> Tensor:
    return grad * _numbers(grad)


@pytest.mark.parametrize("codegen", (None, "eager"))
def test_gradients_are_read_and_written(ranks, codegen):
    ranks(2).run(_read_and_write_gradients, codegen)


def _freeze(codegen: str | None) -> None:
    for stage in STAGES:
        mine, alone = dsgraph.partition(_build(), stage=stage, keep_whole_below=60), _build()
        runs = mine if codegen is None else torch.compile(mine, backend="dsgraph", options={"codegen": codegen})
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2) for model in (mine, alone)]
        for step, frozen in enumerate((False, True, False)):
            for model in (mine, alone):
                model.split.weight.requires_grad = not frozen
                model.whole.bias.requires_grad_(not frozen)
                assert model.split.weight.requires_grad is not frozen
            _step(runs, alone, optimizers, step)
            _check(mine, alone, f"stage {stage}, step {step}")


@pytest.mark.parametrize("codegen", (None, pytest.param("eager", marks=pytest.mark.full)))
def test_parameters_are_frozen_through_the_attribute(ranks, codegen):
    ranks(2).run(_freeze, codegen)


def _write_with_low_precision() -> None:
    """Parameters that the forward sees in bfloat16 are written to in the precision of the shards."""
    for stage in STAGES:
        mine = dsgraph.partition(_build(), stage=stage, keep_whole_below=60, param_dtype=torch.bfloat16)
        alone = _build()
        for name, write in WRITES.items():
            if name in ("augmented", "orthogonal"):
                continue  # they compute with what they read in bfloat16
            for model in (mine, alone):
                torch.manual_seed(3)
                write(model)
            _check(mine, alone, f"stage {stage}, after {name}")
        assert mine.split.weight.dtype is torch.bfloat16
        mine(*_batch(0, 0)).backward()


def test_writes_keep_the_precision_of_the_shards(ranks):
    ranks(2).run(_write_with_low_precision)


def _hold() -> None:
    """Code outside the model that reads a parameter once, and uses it in every step."""
    for stage in STAGES:
        mine, alone = dsgraph.partition(_build(), stage=stage, keep_whole_below=60), _build()
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in (mine, alone)]
        held = [(model.split.weight, model.split.weight.data[2:], model.whole.weight) for model in (mine, alone)]
        world, rank = dist.get_world_size(), dist.get_rank()
        for step in range(3):
            _penalized(mine, held[0], _batch(step, rank)).backward()
            (sum(_penalized(alone, held[1], _batch(step, other)) for other in range(world)) / world).backward()
            for optimizer, (_, part, _) in zip(optimizers, held, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                part.clamp_(-0.2, 0.2)
            _check(mine, alone, f"stage {stage}, step {step}")


def _penalized(model: nn.Module, held: tuple[Tensor, ...], batch: tuple[Tensor, ...]) -> Tensor:
    split, _, whole = held
    return model(*batch) + (whole @ split).square().mean()


def test_what_is_held_follows_the_shards(ranks):
    ranks(2).run(_hold)


def _penalize(codegen: str | None) -> None:
    """The two ways that docs/reference/limits.md shows."""
    for stage in STAGES:
        for penalty in (_penalty_by_parameters, _penalty_by_attributes):
            mine, alone = dsgraph.partition(_build(), stage=stage, keep_whole_below=60), _build()
            runs = mine if codegen is None else torch.compile(mine, backend="dsgraph", options={"codegen": codegen})
            world, rank = dist.get_world_size(), dist.get_rank()
            for number in range(2):
                with dsgraph.accumulate(mine) if number == 0 else nullcontext():
                    loss = runs(*_batch(number, rank)) + 0.1 * penalty(mine)
                    loss.backward()
                expected = sum(alone(*_batch(number, other)) for other in range(world)) / world
                (expected + 0.1 * sum(p.square().sum() for p in alone.parameters())).backward()
            for ours, theirs in zip(mine.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=RTOL, atol=ATOL)


def _penalty_by_parameters(model: nn.Module) -> Tensor:
    return sum(p.square().sum().full_tensor() for p in model.parameters())


def _penalty_by_attributes(model: nn.Module) -> Tensor:
    layers = [layer for layer in model.modules() if hasattr(layer, "weight")]
    weights = sum(layer.weight.square().sum() for layer in layers)
    return weights + sum(layer.bias.square().sum() for layer in layers if hasattr(layer, "bias"))


@pytest.mark.parametrize("codegen", (None, pytest.param("eager", marks=pytest.mark.full)))
def test_a_penalty_in_the_loss(ranks, codegen):
    ranks(2).run(_penalize, codegen)


def _compile_a_function(backend: str, stages: Sequence[int]) -> None:
    """A compiled loss that is given the weight of a head."""
    for stage in stages:
        mine, alone = dsgraph.partition(_build(), stage=stage, keep_whole_below=60), _build()
        options = {"options": {"codegen": "eager"}} if backend == "dsgraph" else {}
        loss = torch.compile(_loss, backend=backend, **options)
        world, rank = dist.get_world_size(), dist.get_rank()
        held = mine.split.weight
        for step in range(2):
            x = torch.randn(3, 7, generator=torch.Generator().manual_seed(step))
            y = _batch(step, rank)[1][:3]
            _compare_losses(loss(x, mine.split.weight, mine.whole.weight, y), alone, x, step)
            loss(x, held, mine.whole.weight, y).backward()
            (sum(_alone_loss(alone, x, step, other) for other in range(world)) / world).backward()
            for ours, theirs in zip(_layers(mine), _layers(alone), strict=True):
                torch.testing.assert_close(ours.weight.grad + 0, theirs.weight.grad, rtol=RTOL, atol=ATOL)
            for model in (mine, alone):
                _clip(model)
                model.zero_grad()


def _loss(x: Tensor, split: Tensor, whole: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(torch.tanh(F.linear(x, split)), whole), y)


def _alone_loss(alone: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    return _loss(x, alone.split.weight, alone.whole.weight, _batch(step, rank)[1][:3])


def _compare_losses(loss: Tensor, alone: nn.Module, x: Tensor, step: int) -> None:
    torch.testing.assert_close(loss, _alone_loss(alone, x, step, dist.get_rank()), rtol=RTOL, atol=ATOL)
    loss.backward()
    world = dist.get_world_size()
    (sum(_alone_loss(alone, x, step, rank) for rank in range(world)) / world).backward()


@pytest.mark.parametrize(
    ("backend", "stages"),
    (("dsgraph", STAGES), pytest.param("inductor", STAGES, marks=pytest.mark.full)),
)
def test_a_compiled_function_is_given_a_parameter(ranks, backend, stages):
    ranks(2).run(_compile_a_function, backend, stages)

"""Transforms of `torch.func`: inside a forward, around a model, and over parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import dsgraph
from dsgraph.utils.errors import PartitionError
from tests.distributed.training import compare

pytestmark = pytest.mark.distributed

Function = Callable[[Tensor], Tensor]


def _vjp(f: Function, x: Tensor) -> Tensor:
    y, back = vjp(f, x)
    return back(torch.ones_like(y))[0]


# Each calls `f(x)` or derives it, for a batch x.
TRANSFORMS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "vmap": lambda f, x: vmap(f)(x),
    "grad": lambda f, x: vmap(grad(lambda row: f(row).square().sum()))(x),
    "grad of a batch": lambda f, x: grad(lambda batch: f(batch).square().sum())(x),
    "jacrev": lambda f, x: vmap(jacrev(f))(x),
    "jacfwd": lambda f, x: vmap(jacfwd(f))(x),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "vjp": _vjp,
    "hessian": lambda f, x: hessian(lambda row: f(row).square().sum())(x[0]),
}


class Transformed(nn.Module):
    """A transform of a part of the model; the loss needs the gradients of its parameters."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(6, 5), nn.Linear(5, 4), how

    def _part(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return TRANSFORMS[self.how](self._part, x).square().mean() + self._part(x).mean()


def _batch(step: int, rank: int) -> tuple[Tensor, ...]:
    return (torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank)),)


def _train(how: str, stage: int, codegen: str | None, keep_whole_below: int, micro_batches: int) -> None:
    compare(
        lambda: Transformed(how),
        _batch,
        stage=stage,
        codegen=codegen,
        steps=2,
        keep_whole_below=keep_whole_below,
        micro_batches=micro_batches,
        evaluate=how != "jacfwd" or torch.__version__ >= "2.12",  # which derives in inference mode as well
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("micro_batches", (1, 2))
@pytest.mark.parametrize("keep_whole_below", (0, 22))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("codegen", (None, pytest.param("eager", marks=pytest.mark.full)))  # below, of a model
@pytest.mark.parametrize("how", TRANSFORMS)
def test_transforms_of_a_part_match_one_process(ranks, how, codegen, stage, keep_whole_below, micro_batches):
    ranks(2).run(_train, how, stage, codegen, keep_whole_below, micro_batches)


def _around(how: str, stage: int, is_compiled: bool) -> None:
    """A transform of the whole model, which an enclosing function calls, compiled with it or not."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    torch.manual_seed(0)
    model = dsgraph.partition(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), stage=stage)
    (x,) = _batch(0, dist.get_rank())

    def whole(x: Tensor) -> Tensor:
        return TRANSFORMS[how](model, x)

    run: Any = torch.compile(whole, backend="dsgraph", options={"codegen": "eager"}) if is_compiled else whole
    torch.testing.assert_close(run(x), TRANSFORMS[how](alone, x))
    run(x).square().sum().backward()


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_compiled", (False, True))
@pytest.mark.parametrize("stage", (0, 1, 3))
@pytest.mark.parametrize("how", TRANSFORMS)
def test_transforms_of_a_model_match_one_process(ranks, how, stage, is_compiled):
    ranks(2).run(_around, how, stage, is_compiled)


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ("grad", "jvp"))
@pytest.mark.parametrize("stage", (1, 3))
def test_they_are_compiled_with_what_is_around_them(one_rank, how, stage):
    model = dsgraph.partition(Transformed(how), stage=stage, keep_whole_below=0)
    torch.compile(model, backend="dsgraph", options={"codegen": "eager"})(*_batch(0, 0)).backward()
    report = dsgraph.report(model)
    assert (len(report.compiles), report.graph_breaks, report.fallbacks) == (1, (), ())
    merged = next(item for item in report.compiles[0].passes if item.name == "merge_gathers")
    assert merged.changed == 4, "each parameter is gathered once for the transform and for the rest"


def _per_sample(stage: int) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    torch.manual_seed(0)
    model = dsgraph.partition(
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), stage=stage, keep_whole_below=0
    )
    (x,) = _batch(0, dist.get_rank())

    def gradients(module: nn.Module, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
            return functional_call(module, parameters, (row,)).square().mean()

        return vmap(grad(loss), in_dims=(None, 0))(parameters, x)

    full = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    expected = gradients(alone, {name: param.detach() for name, param in alone.named_parameters()})
    for name, found in gradients(model, full).items():
        torch.testing.assert_close(found, expected[name])
    with pytest.raises(PartitionError, match=r"'weight' of Linear: a transform of torch.func.*full_tensor\(\)"):
        gradients(model, {name: param.detach() for name, param in model.named_parameters()})


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_gradients_of_single_samples(ranks, stage):
    ranks(2).run(_per_sample, stage)

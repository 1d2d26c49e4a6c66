"""A transform that the product does not know: the seam and gather markers need none by name."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.inductor_ext import REDUCTIONS
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.transforms.parameter_transform import ParameterTransform
from dsgraph.utils.errors import PartitionError

pytestmark = pytest.mark.usefixtures("one_rank")

CODEGENS = (None, "eager")


class Doubled(ParameterTransform):
    """Modules compute with twice the parameter."""

    is_copied: ClassVar[bool] = True

    def after_gather(self, full: Tensor) -> Tensor:
        return full * 2


class Tripled(ParameterTransform):
    """The gradient is three times what it is; the number of reductions is kept."""

    reduction: ClassVar[str] = "tripled"

    def __init__(self) -> None:
        self.count = torch.zeros(1, requires_grad=True)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.count,)


def _tripled(grad, shard_shape, kept, accumulated_grad, **options):
    (count,) = kept
    return grad * 3, [count + 1]


def _layer(stage: int) -> tuple[nn.Module, ParameterState]:
    torch.manual_seed(0)
    model = dsgraph.partition(nn.Linear(4, 3, bias=False), stage=stage, keep_whole_below=0)
    (entry,) = model._dsgraph.partition.parameters
    return model, entry


def _gradient(model: nn.Module, codegen: str | None) -> Tensor:
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    runs(torch.ones(2, 4)).sum().backward()
    (param,) = model.parameters()
    grad = param.grad.to_local().clone()
    param.grad = None
    return grad


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("stage", (0, 2, 3))
def test_modules_compute_with_what_a_transform_returns(stage, codegen):
    model, entry = _layer(stage)
    plain = _gradient(model, codegen)
    entry.register(Doubled())
    assert torch.equal(_gradient(model, codegen), 2 * plain)
    assert torch.equal(_gradient(copy.deepcopy(model), None), 2 * plain)
    entry.unregister(Doubled)
    assert torch.equal(_gradient(model, codegen), plain)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_a_transform_reduces_the_gradient(monkeypatch, codegen):
    monkeypatch.setitem(REDUCTIONS, "tripled", _tripled)
    model, entry = _layer(0)
    plain = _gradient(model, codegen)
    transform = Tripled()
    entry.register(transform)
    assert torch.equal(_gradient(model, codegen), 3 * plain)
    assert transform.count.grad == 1, "its value for the next time"
    assert torch.equal(_gradient(copy.deepcopy(model), None), plain), "a copy has no part in it"


def test_a_stage_that_reduces_in_each_backward_has_no_other_reduction():
    _, entry = _layer(2)
    with pytest.raises(PartitionError, match="at stage 2 the gradient of 'weight' is reduced in each backward"):
        entry.register(Tripled())


def test_a_parameter_has_one_transform_of_a_kind_and_one_reduction():
    _, entry = _layer(0)
    first, second = Doubled(), Doubled()
    entry.register(first)
    entry.register(second)
    assert entry.transforms == (second,) and entry.find(Doubled) is second

    class Other(Tripled):
        pass

    entry.register(Tripled())
    with pytest.raises(PartitionError, match="the gradient of 'weight' is reduced by another transform already"):
        entry.register(Other())
    entry.unregister(Tripled)
    assert entry.reducer is None and entry.find(Tripled) is None

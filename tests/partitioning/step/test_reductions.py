"""Gradients of units: reduced outside plans, and added to `.grad` as autograd does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.partitioning.state import partition_states
from dsgraph.partitioning.step.reductions import add_gradient, start_reductions

from .stacks import WIDTH, Stack, partitioned

X = torch.ones(2, WIDTH)


class _Twins(nn.Module):
    """Two parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b


@pytest.mark.parametrize(("keep_whole_below", "steps"), ((0, 1), (0, 2), (1000, 1), (1000, 2)))
def test_gradients_have_memory_of_their_own(one_rank, keep_whole_below, steps):
    model = nn.Sequential(_Twins(), _Twins())
    dsgraph.partition(model, keep_whole_below=keep_whole_below, blocks="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    for _ in range(steps):
        model.zero_grad()
        for _ in range(2):
            compiled(torch.ones(2, 8)).sum().backward()
        grads = [param.grad.to_local() for param in model.parameters()]
        assert all(torch.equal(grad, torch.full((2, 8), 2.0)) for grad in grads)
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 4


@pytest.mark.parametrize("register", ("register_hook", "register_post_accumulate_grad_hook"))
def test_hooks_of_a_parameter_run_once_in_each_backward(one_rank, register):
    model, steps = partitioned(Stack())
    weight = model._orig_mod.blocks[1].linear._parameters["weight"]
    model(X).sum().backward()
    expected, weight.grad = weight.grad.to_local(), None
    seen: list[Tensor] = []

    def double(given: Tensor) -> Tensor | None:
        seen.append(given)
        return 2 * given if register == "register_hook" else None

    getattr(weight, register)(double)
    for _ in range(3):
        weight.grad = None
        model(X).sum().backward()
        scale = 2 if register == "register_hook" else 1
        torch.testing.assert_close(weight.grad.to_local(), scale * expected)
    assert len(seen) == 3
    steps.left = []
    model(X).sum().backward()
    assert not steps.left


def test_gradients_that_are_asked_for_are_returned(one_rank):
    model, _ = partitioned(Stack())
    model(X).sum().backward()
    expected = [param.grad.to_local().clone() for param in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        found = torch.autograd.grad(model(X).sum(), list(model.parameters()))
        for grad, other in zip(found, expected, strict=True):
            torch.testing.assert_close(grad.to_local(), other)
    assert all(param.grad is None for param in model.parameters())


def test_replicated_gradients_are_averaged_together(fake_ranks):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    (state,) = partition_states(dsgraph.partition(model, keep_whole_below=1000))
    pairs = [(entry, torch.full(entry.spec.shape, 8.0 * at)) for at, entry in enumerate(state.parameters)]
    for at, finish in enumerate(start_reductions(pairs)):  # the other ranks add nothing
        mean = finish()
        assert torch.equal(mean, torch.full(pairs[at][1].shape, float(at)))
        assert mean.untyped_storage().nbytes() == mean.nbytes, "nothing else lives with it"


def test_gradients_are_added_and_those_of_frozen_parameters_dropped(one_rank):
    (state,) = partition_states(dsgraph.partition(nn.Linear(8, 8), keep_whole_below=0))
    weight, bias = (entry.param for entry in state.parameters)
    bias.requires_grad_(False)
    for _ in range(2):
        add_gradient(weight, torch.ones(8, 8))
        add_gradient(bias, torch.ones(8))
    assert torch.equal(weight.grad.to_local(), torch.full((8, 8), 2.0)) and bias.grad is None

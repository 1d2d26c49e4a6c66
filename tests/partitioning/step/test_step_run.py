"""Training by plans of steps: what a user sees of it, on one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.partitioning.state import partition_states
from dsgraph.utils.errors import PartitionError

from .stacks import WIDTH, Block, Stack, Twins, partitioned

pytestmark = pytest.mark.usefixtures("one_rank")

X = torch.ones(2, WIDTH)
ALL, SKIPS, EXITS, TWICE = (0, 1, 2, 3), (0, 1, 3), (0, 2), (0, 1, 1, 2, 3)


@pytest.mark.parametrize(
    "orders",
    [
        (ALL, ALL, EXITS, ALL),
        (ALL, ALL, SKIPS, SKIPS, ALL),
        (ALL, (0, 1), ALL, ALL),
        ((0, 1), ALL, (0, 1), ALL),
        (TWICE, TWICE, ALL, TWICE),
        ((3, 2, 1, 0), ALL, (1,), ALL),
    ],
    ids=str,
)
def test_steps_with_other_calls_compute_what_the_uncompiled_model_does(orders):
    twins = Twins()
    for order in orders:
        twins.train(*order)


def test_each_order_of_calls_is_planned_once_and_then_predicted():
    twins = Twins()
    for _ in range(2):
        twins.train(*ALL)
        twins.train(*SKIPS)
    assert len(twins.steps.plans) == 2 and twins.steps.left
    twins.steps.left, alone = [], twins.steps.gathered_alone
    for _ in range(3):
        twins.train(*ALL)
        twins.train(*SKIPS)
    assert len(twins.steps.plans) == 2
    assert not twins.steps.left and twins.steps.gathered_alone == alone


@pytest.mark.parametrize("orders", [(ALL, (0, 1)), ((0, 1), ALL)], ids=str)
def test_a_step_that_is_the_beginning_of_another_is_a_kind_of_its_own(orders):
    twins = Twins()
    for order in 3 * orders:
        twins.train(*order)
    twins.steps.left = []
    for order in 2 * orders:
        twins.train(*order)
    assert sorted(len(plan.record.calls) for plan in twins.steps.plans) == [2, 4] and not twins.steps.left


def test_the_blocks_of_a_step_are_those_that_ran():
    twins = Twins()
    for order in 3 * (ALL, SKIPS):
        twins.train(*order)
        ran = [block.name for block in twins.steps.ran()]
        assert ran == [f"blocks.{number}" for number in order]


def test_steps_of_training_and_evaluation_are_predicted():
    twins = Twins()

    def step() -> None:
        twins.train(*ALL)
        with torch.no_grad():
            twins.forward(*ALL)
        with torch.inference_mode():
            twins.forward(*ALL)

    for _ in range(3):
        step()
    alone = twins.steps.gathered_alone
    step()
    assert len(twins.steps.plans) == 2 and not twins.steps.left and twins.steps.gathered_alone == alone


@pytest.mark.parametrize("order", [(0, 1, -1), (-1,), (0, -2, 1, 2, 3), (0, 1, 2, -2, 3)], ids=str)
def test_a_step_that_failed_leaves_nothing(order):
    twins = Twins()
    for _ in range(2):
        twins.train(*ALL)
    for _ in range(2):
        with pytest.raises(ValueError, match="in the"):
            twins.forward(*order)[0].backward()
        with pytest.raises(ValueError, match="in the"):
            twins.compiled(X).sum().backward()
        twins.drop_gradients()
        twins.train(*ALL)
    twins.train(*SKIPS)


def test_gradients_of_several_backwards_are_added():
    twins = Twins()
    for _ in range(3):
        pairs = [twins.forward(*ALL) for _ in range(2)]
        for pair in reversed(pairs):
            for loss in pair:
                loss.backward()
        for loss in twins.forward(*SKIPS):
            loss.backward(retain_graph=True)
            loss.backward()
        twins.update()


def test_several_forwards_have_one_backward():
    twins = Twins()
    for _ in range(3):
        for first, second in zip(twins.forward(*ALL), twins.forward(*ALL), strict=True):
            (first + second).backward()
        twins.update()
    assert len(twins.steps.plans) == 1 and not twins.steps.left


@pytest.mark.parametrize("fused", (True, False))
def test_an_update_between_forward_and_backward_is_the_error_of_one_process(fused):
    model, _ = partitioned(Stack())
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    model(X).sum().backward()
    late = model(X).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: parameter 'blocks\.3\.linear\.weight'"):
        late.backward()
    optimizer.zero_grad()
    model(X).sum().backward()


@pytest.mark.parametrize("name", ("blocks.0.linear.weight", "blocks.3.linear.bias"))
def test_a_step_on_parameters_that_a_backward_does_not_read_is_allowed(name):
    twins = Twins()
    twins.train(*ALL)
    losses = twins.forward(*ALL)
    for model in twins.models:
        param = dict(model.named_parameters())[name]
        param.grad = torch.ones_like(param)
        torch.optim.AdamW([param], fused=True).step()
        param.grad = None
    for loss in losses:
        loss.backward()
    twins.update()


def test_a_user_s_hooks_get_what_is_saved_besides_parameters():
    model, _ = partitioned(Stack())
    model(X).sum().backward()
    expected = [param.grad.to_local().clone() for param in model.parameters()]
    for _ in range(3):
        model.zero_grad()
        packed: list[Tensor] = []
        unpacked: list[Tensor] = []

        def pack(x: Tensor, packed: list[Tensor] = packed) -> Tensor:
            packed.append(x)
            return x.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x, to=unpacked: to.append(x) or x):
            loss = model(X).sum()
        loss.backward()
        assert len(packed) == len(unpacked) >= 4
        assert not {param.to_local().data_ptr() for param in model.parameters()} & {x.data_ptr() for x in packed}
        for param, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad.to_local(), grad)


@pytest.mark.parametrize("mode", (torch.inference_mode, torch.no_grad))
def test_a_model_that_was_evaluated_first_can_be_trained(mode):
    twins = Twins()
    for _ in range(2):
        with mode():
            twins.forward(*ALL)
    for _ in range(2):
        twins.train(*ALL)


class _Leaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.leaked, self.turned = self.linear.weight, self.linear.weight.T
        return super().forward(x)


@pytest.mark.parametrize("codegen", ("eager", pytest.param("inductor", marks=pytest.mark.inductor)))
def test_a_parameter_that_leaves_a_graph_has_values(codegen):
    model = nn.Sequential(_Leaking(), _Leaking())
    compiled, _ = partitioned(model, codegen=codegen)
    for _ in range(2):
        compiled(X).sum().backward()
        for block in model:
            own = block.linear._parameters["weight"].to_local()
            assert torch.equal(block.leaked, own) and torch.equal(block.turned.T, own)


def test_a_layer_that_was_replaced_is_a_part_of_its_block():
    model = nn.Sequential(Block(), Block(), Block())
    compiled, steps = partitioned(model)
    compiled(X).sum().backward()
    model[1].linear = nn.Linear(WIDTH, WIDTH)
    dsgraph.partition(model)
    for _ in range(2):
        compiled(X).sum().backward()
    assert [[entry.name for entry in block.entries] for block in steps.blocks] == [
        [f"{number}.linear.weight", f"{number}.linear.bias"] for number in range(3)
    ]
    (plan,) = steps.plans
    assert set(plan.shards.values()) == set(partition_states(model)[0].parameters)
    assert model[1].linear._parameters["weight"].grad is not None


def test_a_deep_copy_has_steps_of_its_own():
    model, steps = partitioned(Stack())
    model(X).sum().backward()
    (state,) = partition_states(copy.deepcopy(model._orig_mod))
    assert state.step is not steps and not state.step.plans
    assert state.step.operations is state.operations
    assert {entry for block in state.step.blocks for entry in block.entries} == set(state.parameters)


def test_a_model_that_is_converted_is_trained_in_its_new_dtype():
    twins = Twins()
    for model in twins.models:
        model.to(torch.float64)
    for _ in range(3):
        twins.train(*ALL, dtype=torch.float64)
    assert all(param.dtype is torch.float64 for param in twins.models[1].parameters())


@pytest.mark.parametrize("is_compiled", (True, False))
def test_a_model_can_be_converted_after_it_was_trained(is_compiled):
    twins = Twins()
    twins.compiled = twins.compiled if is_compiled else twins.models[1]
    for _ in range(3):
        twins.train(*ALL)
    for model in twins.models:
        model.float()
    assert twins.steps.plans, "nothing has changed"
    for model in twins.models:
        model.to(torch.float64)
    assert not twins.steps.plans
    for _ in range(2):
        twins.train(*ALL, dtype=torch.float64)


class _Complex(Block):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.complex(x, 2 * x) * torch.view_as_complex(self.turn).conj()
        return super().forward(turned.real * turned.imag)


def test_a_parameter_may_be_read_as_another_dtype():
    torch.manual_seed(0)
    plain = nn.Sequential(_Complex(), _Complex())
    model = copy.deepcopy(plain)
    compiled, _ = partitioned(model)
    for _ in range(2):
        plain(X).sum().backward()
        compiled(X).sum().backward()
        for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(theirs.grad.to_local(), mine.grad)


def test_replaced_data_is_refused():
    model, _ = partitioned(Stack())
    model(X).sum().backward()
    weight: Any = model._orig_mod.blocks[1].linear._parameters["weight"]
    weight.data = weight.data * 2
    with pytest.raises(PartitionError, match=r"'blocks\.1\.linear\.weight': its \.data was replaced"):
        model(X)


def test_second_derivatives_are_refused():
    model, _ = partitioned(Stack())
    model(X).sum().backward()
    model(X).sum().backward(create_graph=True)
    grads = [param.grad.to_local().square().sum() for param in model.parameters()]
    with pytest.raises(NotImplementedError, match="second derivatives"):
        sum(grads).backward()

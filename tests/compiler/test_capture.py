"""The inputs of a captured graph, as the backend describes them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import dsgraph
from dsgraph.passes import GraphPass, InputRole, PassResult, Phase


@dataclass(frozen=True)
class Record(GraphPass):
    """Keeps the facts of each graph that it sees."""

    found: list = field(default_factory=list)
    phase: Phase = Phase.CAPTURE

    def run(self, gm, ctx):
        self.found.append(ctx)
        return PassResult()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.head.weight = self.embed.weight
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.head(self.block(self.embed(x)) * self.scale).sum()


NAMES = ["block.0.bias", "block.0.weight", "block.1.weight", "embed.weight", "head.bias"]
SPLIT = [name for name in NAMES if name != "block.0.bias"]  # the smallest


def parted(stage, model=None):
    return dsgraph.partition(model or Model(), stage=stage, keep_whole_below=64)


def compiled(model, record):
    torch._dynamo.reset()
    pipeline = dsgraph.default_pipeline() + [record]
    return torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": pipeline})


def by_role(ctx, role):
    return sorted(item.parameter for item in ctx.roles.values() if item.role is role)


@pytest.mark.parametrize("phase", [Phase.CAPTURE, Phase.FORWARD])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_input_has_a_role(fake_ranks, stage, phase):
    record = Record(phase=phase)
    compiled(parted(stage), record)(torch.arange(4)).backward()
    (ctx,) = record.found
    assert by_role(ctx, InputRole.SHARD) == NAMES  # the tied one once, under its first name
    assert all(ctx.roles[node].parameter == info.name for node, info in ctx.params.items())
    assert len(ctx.params) == len(NAMES)
    assert by_role(ctx, InputRole.GATHERED_COPY) == (SPLIT if stage in (1, 2) else [])
    assert {node for node, item in ctx.roles.items() if item.role is InputRole.GATHERED_COPY} == ctx.gathered_copies
    assert by_role(ctx, InputRole.BUFFER) == by_role(ctx, InputRole.DATA) == [""]


@pytest.mark.parametrize("stage", [0, 1])
def test_roles_under_accumulate(fake_ranks, stage):
    record, model = Record(), parted(stage)
    step = compiled(model, record)
    with dsgraph.accumulate(model):
        step(torch.arange(4)).backward()
    step(torch.arange(4)).backward()
    first, last = record.found
    copies = SPLIT if stage else []
    assert by_role(first, InputRole.GATHERED_COPY) == by_role(last, InputRole.GATHERED_COPY) == copies
    assert by_role(last, InputRole.SHARD) == NAMES
    assert by_role(last, InputRole.ACCUMULATED_GRADIENT) == NAMES


def test_equal_layers_have_equal_names(fake_ranks):
    record, found = Record(), []
    for number in range(2):
        model = parted(1, nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))
        compiled(model[number], record)(torch.randn(4, 8))
        found.append(record.found[-1])
    assert [by_role(ctx, InputRole.SHARD) for ctx in found] == [["weight"], ["weight"]]
    assert [by_role(ctx, InputRole.GATHERED_COPY) for ctx in found] == [["weight"], ["weight"]]


@pytest.mark.parametrize("stage", [1, 3])
def test_functions_outside_of_modules(fake_ranks, stage):
    record, model = Record(), parted(stage)
    compiled(lambda x: model(x), record)(torch.arange(4)).backward()
    (ctx,) = record.found
    assert by_role(ctx, InputRole.SHARD) == sorted(info.name for info in ctx.params.values()) == NAMES
    assert by_role(ctx, InputRole.GATHERED_COPY) == (SPLIT if stage == 1 else [])


def test_copies_of_a_model_have_tables_of_their_own(fake_ranks):
    record, model = Record(), parted(1)
    compiled(copy.deepcopy(model), record)(torch.arange(4)).backward()
    (ctx,) = record.found
    assert by_role(ctx, InputRole.SHARD) == NAMES
    assert by_role(ctx, InputRole.GATHERED_COPY) == SPLIT


def test_parameters_of_functional_call_are_named_by_where_they_come_from(fake_ranks):
    record, model = Record(), parted(3)
    shards = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}

    def call(x):
        return torch.func.functional_call(model, shards, (x,))

    compiled(call, record)(torch.arange(4)).backward()
    (ctx,) = record.found
    assert len(ctx.params) == len(NAMES)
    assert all(item.parameter for item in ctx.roles.values() if item.role is InputRole.SHARD)


def test_a_model_that_is_not_partitioned(fake_ranks):
    record = Record()
    with pytest.warns(UserWarning, match="not partitioned"):
        compiled(Model(), record)(torch.arange(4))
    (ctx,) = record.found
    assert not ctx.params
    assert by_role(ctx, InputRole.SHARD) == NAMES
    assert by_role(ctx, InputRole.BUFFER) == by_role(ctx, InputRole.DATA) == [""]


class Doubled(torch.autograd.Function):
    """Doubles in place, as Megatron's functions sum over ranks in place."""

    @staticmethod
    def forward(ctx, x, copies):
        x = x.clone()
        x.mul_(2)
        return x.clone() if copies else x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


@pytest.mark.parametrize("copies", [False, True])
def test_gradients_of_functions_that_write_to_their_result_are_right_or_refused(one_rank, copies):
    weight = torch.ones(3, requires_grad=True)
    run = torch.compile(
        lambda: Doubled.apply(weight * 3, copies).sum(), backend="dsgraph", options={"codegen": "eager"}
    )
    if torch.__version__ < "2.12" and not copies:
        with pytest.raises(dsgraph.PartitionError, match=r"gradient of zeros .*test_capture\.py:\d+.*torch 2\.12"):
            run()
    else:
        run().backward()
        assert weight.grad.tolist() == [6.0] * 3

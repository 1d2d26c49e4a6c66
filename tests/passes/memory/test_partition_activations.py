"""`PartitionActivations`: which saved values are sliced, and where their gathers stand."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from functorch.compile import aot_function, nop
from torch.testing import FileCheck

from dsgraph.passes import (
    AxisRole,
    CaptureFacts,
    GraphInput,
    InputRole,
    MeshAxis,
    Partitioner,
    Pipeline,
    Runner,
    graph_pass,
)
from dsgraph.passes.memory.partition_activations import PartitionActivations
from tests.passes.tracing import code

AXIS = MeshAxis("tp", 2, "0", "fake", AxisRole.TENSOR)
DATA, OWN = GraphInput(InputRole.DATA), GraphInput(InputRole.SHARD, "weight", slice_group="0")


def _graphs(function, *shapes, roles, axes=(AXIS,)):
    """Return the forward and the backward of a function after the pass, and its record."""
    graphs = []

    @graph_pass(phase="forward")
    def keep_forward(gm, ctx):
        graphs.append(gm)
        return 0

    @graph_pass(phase="backward")
    def keep_backward(gm, ctx):
        graphs.append(gm)
        return 0

    runner = Runner(Pipeline([PartitionActivations(least_bytes=1), keep_forward, keep_backward]))
    facts = CaptureFacts(axes=axes, roles=MappingProxyType(dict(enumerate(roles))))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    aot_function(function, nop, partition_fn=Partitioner(runner, facts))(*inputs)
    return (*graphs, next(item for item in runner.records if item.name == "partition_activations"))


def _mixed(x, own):
    return torch.sin(torch.tanh(x).t().contiguous().t()) @ torch.sin(torch.tanh(own))


@pytest.mark.usefixtures("fake_ranks")
def test_what_is_alike_is_sliced_and_gathered_ahead_of_its_use():
    forward, backward, record = _graphs(_mixed, (4, 6), (6, 2), roles=(DATA, OWN))
    FileCheck().check("tanh").check("own_slice").check("return").run(code(forward))
    FileCheck().check("all_gather_into_tensor").check("wait_tensor").check("permute").run(code(backward))
    assert record.changed == code(forward).count("own_slice.default(") >= 1
    assert any("not proved equal" in note for note in record.notes), "what is made of the slice stays whole"


@pytest.mark.usefixtures("fake_ranks")
def test_what_cannot_be_shared_evenly_stays():
    _, _, record = _graphs(_mixed, (3, 5), (5, 2), roles=(DATA, OWN))
    assert record.changed == 0 and any("its elements do not divide evenly" in note for note in record.notes)


@pytest.mark.usefixtures("fake_ranks")
def test_inputs_of_which_nothing_is_known_prove_nothing():
    _, _, record = _graphs(_mixed, (4, 6), (6, 2), roles=())
    assert record.changed == 0


def test_without_a_tensor_axis_it_says_so():
    _, _, record = _graphs(_mixed, (4, 6), (6, 2), roles=(DATA, OWN), axes=())
    assert record.changed == 0 and "the model has no tensor-parallel operator" in record.notes[0]

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dsgraph
from dsgraph.partitioning.forward_inputs import move_inputs

pytestmark = pytest.mark.usefixtures("one_rank")


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, also: dict[str, list[Tensor]], index: Tensor) -> Tensor:
        self.seen[:] = [x.dtype, also["x"][0].dtype, index.dtype]
        return self.layer(x + also["x"][0])[index]


def _call(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 8).view(2, 4)
    return model(x, also={"x": [x.double()]}, index=torch.tensor([1, 0]))


@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize("compiled", (False, True))
def test_inputs_are_cast_as_by_fsdp2(stage, compiled):
    theirs = _Nested()
    fully_shard(theirs, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    expected = _call(theirs)
    ours = dsgraph.partition(_Nested(), stage=stage, keep_whole_below=0, param_dtype=torch.bfloat16)
    found = _call(torch.compile(ours, backend="dsgraph", options={"codegen": "eager"}) if compiled else ours)
    assert ours.seen == theirs.seen == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert torch.equal(found, expected)


def test_the_casts_are_no_graph_of_their_own():
    torch._dynamo.reset()
    model = dsgraph.partition(nn.Linear(4, 4), stage=2, keep_whole_below=0, param_dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"}, fullgraph=True)
    compiled(torch.ones(2, 4, requires_grad=True)).sum().backward()
    (entry,) = dsgraph.report(model).compiles
    assert entry.activations is not None, "the graph of the layer, which has a backward"


def test_the_casts_are_captured_inside_a_larger_graph():
    torch._dynamo.reset()
    model = dsgraph.partition(nn.Linear(4, 4), stage=2, keep_whole_below=0, param_dtype=torch.bfloat16)
    found = torch.compile(lambda x: model(2 * x), backend="eager", fullgraph=True)(torch.ones(2, 4))
    assert found.dtype == torch.bfloat16


def test_an_option_keeps_them():
    model = dsgraph.partition(_Nested(), param_dtype=torch.bfloat16, cast_forward_inputs=False)
    with pytest.raises(RuntimeError, match="same dtype"):
        _call(model)
    assert model.seen == [torch.float32, torch.float64, torch.int64]
    with pytest.raises(dsgraph.PartitionError, match="cast_forward_inputs has no effect without param_dtype"):
        dsgraph.partition(_Nested(), cast_forward_inputs=False)


def test_tensors_on_the_cpu_come_to_the_models_device_and_others_stay():
    there = torch.ones(2, device="meta")
    (moved, kept), keywords = move_inputs((([torch.ones(2, dtype=torch.int64)], there), {"n": 3}), torch.device("meta"))
    assert moved[0].device.type == "meta" and moved[0].dtype == torch.int64 and kept is there and keywords == {"n": 3}
    inputs = [torch.ones(2)]
    assert move_inputs(inputs, torch.device("cpu")) is inputs

"""The verifier refuses nothing of what the default pipeline makes of whole models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dsgraph
from dsgraph.passes.ir.graph import emit
from examples.custom_pass import fold_casts
from tests.models import CASES, build

pytestmark = pytest.mark.slow
EAGER = {"codegen": "eager"}


def _train(model: nn.Module, *batch: torch.Tensor, **options: object) -> None:
    compiled = torch.compile(model, backend="dsgraph", options={**EAGER, **options})
    out = compiled(*batch)
    (out[0] if isinstance(out, tuple) else out).sum().backward()


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("dynamic_gpt")])
@pytest.mark.parametrize("stage", [1, 3])
def test_models(fake_ranks, name, stage):
    model = dsgraph.partition(build(name), stage=stage, keep_whole_below=50)
    _train(model, *CASES[name].batches(0, 0))


def test_two_axes_in_two_dtypes_with_a_pass_of_ones_own(fake_ranks):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    how = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model = dsgraph.partition(build("tied"), mesh, stage=3, keep_whole_below=50, **how)
    _train(model, *CASES["tied"].batches(0, 0), pipeline=dsgraph.default_pipeline() + [fold_casts])


def test_inference(fake_ranks):
    model = dsgraph.partition(build("gpt"), stage=3, keep_whole_below=50)
    with torch.no_grad():
        torch.compile(model, backend="dsgraph", options=EAGER)(*CASES["gpt"].batches(0, 0))


class Statistics(nn.Module):
    """Writes to buffers, draws random numbers, runs a checkpoint region, and returns its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        h = torch.dropout(self.norm(self.first(x)), 0.5, train=True)
        h = torch.utils.checkpoint.checkpoint(lambda h: torch.dropout(self.last(h), 0.1, train=True).sin(), h)
        return h.sum(), self.last.weight, self.first.weight.t(), x.view(-1)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_that_writes_and_returns_parameters(fake_ranks, stage):
    model = dsgraph.partition(Statistics(), stage=stage, keep_whole_below=0)
    _train(model, torch.randn(4, 8))


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_model_returns_of_its_parameters_can_be_written_to(one_rank, stage):
    model = dsgraph.partition(Statistics(), stage=stage, keep_whole_below=0)
    before = model.last.weight.detach().clone()
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            returned = torch.compile(model, backend="dsgraph", options=EAGER)(torch.randn(4, 8))[1]
        returned.detach().add_(1)
        assert torch.equal(model.last.weight.detach(), before)


def test_a_plain_model(one_rank):
    _train(Statistics(), torch.randn(4, 8))


def test_it_can_be_switched_off(one_rank):
    @dsgraph.graph_pass(phase="forward")
    def widen_an_output(gm, ctx):
        (output,) = gm.graph.find_nodes(op="output")
        first, *rest = output.args[0]
        output.args = ((emit(output, torch.ops.aten._to_copy.default, first, dtype=torch.float64), *rest),)
        return 1

    def run(**options):
        torch._dynamo.reset()
        with torch.no_grad():
            options = {**EAGER, "pipeline": [widen_an_output], **options}
            return torch.compile(nn.Linear(2, 2), backend="dsgraph", options=options)(torch.randn(1, 2))

    with pytest.raises(Exception, match="pass widen_an_output changed output 0 from float32"):
        run()
    assert run(verify=False).dtype is torch.float64

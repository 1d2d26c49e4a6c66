from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import FileCheck

import dsgraph
from dsgraph.passes import PassError, Phase, Pipeline
from dsgraph.passes.core.notes import parameter_of
from dsgraph.passes.ir.collectives import collectives, is_gather
from dsgraph.passes.ir.graph import fake_value, find_calls
from dsgraph.passes.zero.compress_gathers import CompressGathers
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.passes import lockstep
from tests.passes.tracing import code, gather, run_pass, trace

BF16 = torch.bfloat16


def _inputs():
    return [torch.randn(3, 4), torch.randn(2, 4)]


def _as_autocast_does(x, a):
    low = gather(a, (4, 4)).to(BF16)
    return torch.mm(x.to(BF16), low).float(), torch.mm(x.to(BF16), low.t())


def test_the_gather_takes_the_precision_in_which_it_is_used():
    gm = trace(_as_autocast_does, *_inputs())
    assert run_pass(CompressGathers(), gm).changed == 1
    FileCheck().check("gather_param.default(a_1, None, [4, 4], dtype = torch.bfloat16").run(code(gm))
    assert {node.args[0].name for node in find_calls(gm, torch.ops.aten._to_copy.default)} == {"x_1", "mm"}
    assert run_pass(CompressGathers(), gm).changed == 0


def test_half_the_bytes_travel_and_the_numbers_are_the_same_bit_for_bit():
    inputs = [_inputs() for _ in range(2)]
    graphs = [trace(_as_autocast_does, *given) for given in inputs]
    for gm in graphs:
        run_pass(InsertZeroCollectives(), gm)
    expected = lockstep.run(graphs, inputs)
    for number, given in enumerate(inputs):
        graphs[number] = trace(_as_autocast_does, *given)
        run_pass(CompressGathers(), graphs[number])
        run_pass(InsertZeroCollectives(), graphs[number])
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        assert all(map(torch.equal, before, after))
    (started,) = graphs[0].graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
    )
    assert started.meta["val"].dtype is BF16


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a: (gather(a, (4, 4)).to(BF16), gather(a, (4, 4))[0]),
        lambda x, a: (lambda w: (w.to(BF16) + 1, w.to(torch.float16) + 1))(gather(a, (4, 4))),
        lambda x, a: (lambda w: (w.to(BF16) + 1, w.sum() + 1))(gather(a, (4, 4))),
        lambda x, a: (gather(a, (4, 4)).double(),),
        lambda x, a: (gather(a, (4, 4)).to(torch.int8),),
        lambda x, a: (gather(a, (4, 4), gathered_copy=x).to(BF16),),
        lambda x, a: (gather(a, (4, 4), group="").to(BF16),),
        lambda x, a: (lambda w: (w.to(BF16), w.to(BF16).t()))(gather(a, (4, 4))),
    ],
    ids=["two gathers", "two lower", "own as well", "higher", "no float", "gathered_copy", "whole", "two returned"],
)
def test_what_is_left_alone(function, request):
    gm = trace(function, torch.randn(4, 4), torch.randn(2, 4))
    expected = 1 if request.node.callspec.id == "two gathers" else 0  # each marker is looked at by itself
    before = code(gm)
    assert run_pass(CompressGathers(), gm).changed == expected
    assert (code(gm) == before) == (expected == 0)


def test_one_cast_may_be_returned():
    gm = trace(lambda x, a: (lambda w: (w.to(BF16), x.to(BF16) @ w.to(BF16)))(gather(a, (4, 4))), *_inputs())
    assert run_pass(CompressGathers(), gm).changed == 1


def test_autocast_gathers_the_weights_of_matrix_products_in_its_own_precision(fake_ranks):
    found = {}

    @dsgraph.graph_pass(phase="joint", requires={"zero-collectives"})
    def keep_dtypes(gm, ctx):
        gathers = [node for node in collectives(gm) if is_gather(node)]
        found.update({parameter_of(node, ctx): fake_value(node).dtype for node in gathers})
        return 0

    layers = nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 8, bias=False))
    model = dsgraph.partition(layers, stage=3, keep_whole_below=0)
    pipeline = [*dsgraph.default_pipeline(), keep_dtypes]
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": pipeline})
    with torch.autocast("cpu", BF16):
        compiled(torch.randn(4, 16))
    names = {name: found[f"parameter {name}"] for name, _ in layers.named_parameters()}
    low = {name for name, dtype in names.items() if dtype is BF16}
    assert low == {"0.weight", "0.bias", "2.weight"}


def test_phase_and_contract():
    assert CompressGathers().phase is Phase.JOINT
    with pytest.raises(PassError, match="compress_gathers must run before insert_zero_collectives"):
        Pipeline([InsertZeroCollectives(), CompressGathers()])

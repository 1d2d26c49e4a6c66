from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.testing import FileCheck

from dsgraph.passes import PassError, Pipeline
from dsgraph.passes.ir.graph import find_calls
from dsgraph.passes.ir.save_plan import is_recomputed
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from dsgraph.passes.zero.lower_fake_weights import LowerFakeWeights
from tests.passes import lockstep
from tests.passes.tracing import code, gather, run_pass, trace

_HOW = {"groups": 0, "transposed": False, "symmetric": True, "stochastic": False}


def _product(x, a, control, how):
    full = gather(a, (4, 4))
    return (torch.mm(x, torch.ops.dsgraph.fake_quantize(full, control, **how).t()),)


def _linear(x, a, control):
    return _product(x, a, control, _HOW)


def _random(x, a, control):
    return _product(x, a, control, {**_HOW, "symmetric": False, "stochastic": True})


def _inputs():
    return [torch.randn(3, 4), torch.randn(2, 4), torch.tensor([7.0, 0.25, 0.0])]


def test_the_op_is_written_out_and_computed_again():
    gm = trace(_linear, *_inputs())
    run_pass(InsertZeroCollectives(), gm)
    assert run_pass(LowerFakeWeights(), gm).changed == 1
    FileCheck().check("all_gather").check("amax").check("round").check("maximum").check("mm").run(code(gm))
    (product,) = find_calls(gm, torch.ops.aten.mm.default)
    node = product.args[1]
    while node.op == "call_function":
        assert is_recomputed(node), f"{node} is kept for the backward"
        node = node.all_input_nodes[0]
    assert run_pass(LowerFakeWeights(), gm).changed == 0


@pytest.mark.parametrize("function", [_linear, _random])
def test_the_numbers_are_the_same_bit_for_bit(function):
    inputs = [_inputs() for _ in range(2)]
    graphs = [trace(function, *given) for given in inputs]
    for gm in graphs:
        run_pass(InsertZeroCollectives(), gm)
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        run_pass(LowerFakeWeights(), gm)
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        assert all(map(torch.equal, before, after))


def _rounded(how):
    return lambda a, control: (torch.ops.dsgraph.fake_quantize(gather(a, (4, 4)), control, **how) * 2,)


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_has_a_lowering_of_each_op(dtype):
    """Its decompositions were applied before the pass ran; an op that it has to decompose is then an error."""
    from torch._inductor.lowering import lowerings

    flags = {"transposed": [False, True], "symmetric": [True, False], "stochastic": [True, False]}
    for groups, *chosen in product([0, 4], *flags.values()):
        how = {"groups": groups, **dict(zip(flags, chosen, strict=True))}
        gm = trace(_rounded(how), torch.randn(2, 4, dtype=dtype), torch.tensor([7.0, 0.25, 0.0]))
        run_pass(InsertZeroCollectives(), gm)
        assert run_pass(LowerFakeWeights(), gm).changed == 1
        called = {node.target for node in gm.graph.nodes if node.op == "call_function"}
        assert not called - set(lowerings), how


def test_it_wants_collectives_first():
    with pytest.raises(PassError, match="zero-collectives"):
        Pipeline([LowerFakeWeights(), InsertZeroCollectives()])

from __future__ import annotations

import torch
from torch.testing import FileCheck

from dsgraph.passes.ir.accumulated_grads import write_accumulated_grads
from dsgraph.passes.ir.graph import find_calls
from dsgraph.passes.zero.bucket_small_reductions import BucketSmallReductions
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.passes.tracing import code, reduce, run_pass, trace


def _reduce_with(total, grad, **how):
    options = {"dtype": torch.float32, "reduce_dtype": torch.float32, "group": "0", "outer_groups": []}
    return torch.ops.dsgraph.reduce_grad(grad, (2, 3), total, **(options | how))


def test_the_sum_comes_first():
    gm = trace(lambda s, g: _reduce_with(s, g * 2), torch.randn(4, 3), torch.randn(4, 3))
    assert write_accumulated_grads(gm) == 1
    FileCheck().check("mul = ").check("add_tensor = torch.ops.aten.add.Tensor(s_1, mul)").check_next(
        "reduce_grad.default(add_tensor, [2, 3], dtype"
    ).run(code(gm))
    assert write_accumulated_grads(gm) == 0


def test_it_is_added_in_its_own_dtype():
    gm = trace(lambda s, g: _reduce_with(s, g), torch.randn(4, 3), torch.randn(4, 3, dtype=torch.bfloat16))
    write_accumulated_grads(gm)
    FileCheck().check("convert_element_type.default(g_1, torch.float32)").check("add.Tensor(s_1, convert").run(code(gm))


def test_two_reductions_of_a_parameter_add_it_once():
    gm = trace(lambda s, g: _reduce_with(s, g) + _reduce_with(s, g * 2), torch.randn(4, 3), torch.randn(4, 3))
    assert write_accumulated_grads(gm) == 1
    FileCheck().check_count("add.Tensor(s_1, ", 1, exactly=True).check("reduce_grad.default(mul, [2, 3], dtype").run(
        code(gm)
    )


def test_each_parameter_adds_its_own():
    gm = trace(
        lambda s, t, g: _reduce_with(s, g) + _reduce_with(t, g), torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)
    )
    assert write_accumulated_grads(gm) == 2
    FileCheck().check("add.Tensor(s_1, g_1)").check("add.Tensor(t_1, g_1)").run(code(gm))


def test_a_reduction_without_a_sum_is_left_alone():
    gm = trace(lambda g: reduce(g, (2, 3)), torch.randn(4, 3))
    before = code(gm)
    assert write_accumulated_grads(gm) == 0
    assert code(gm) == before


def test_passes_see_a_plain_addition():
    whole = {"group": "", "outer_groups": ["0"]}
    gm = trace(
        lambda s, t, g: (_reduce_with(s, g, **whole), _reduce_with(t, g + 1, **whole)),
        *(torch.randn(2, 3) for _ in range(3)),
    )
    write_accumulated_grads(gm)
    assert run_pass(BucketSmallReductions(), gm).changed == 2
    run_pass(InsertZeroCollectives(), gm)
    assert not find_calls(gm, torch.ops.dsgraph.reduce_grad.default)
    FileCheck().check("add.Tensor(s_1").check("add.Tensor(t_1").check("cat").check_count(
        "all_reduce.default(", 1, exactly=True
    ).run(code(gm))

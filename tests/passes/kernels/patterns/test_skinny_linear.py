from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dsgraph.passes.kernels.patterns.skinny_linear import SPEC
from tests.passes.kernels.test_substitute_kernels import substitute

WEIGHT, BIAS = torch.randn(512, 512), torch.randn(512)


@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_skinny_matmul_is_found_and_means_the_same(rows, bias):
    x = torch.randn(1, rows, 512)
    gm, record, result = substitute(lambda x: F.linear(x, WEIGHT, bias).relu(), x, kernels=[SPEC], inference=True)
    assert record.changed == 1 and "skinny_linear" in gm.code and "linear(" not in gm.code.replace("_linear", "")
    torch.testing.assert_close(result, F.linear(x, WEIGHT, bias).relu(), rtol=1e-5, atol=1e-4)


def test_a_weight_of_columns_is_taken_where_each_output_s_numbers_are_neighbours():
    x, rows = torch.randn(2, 512), torch.randn(40, 512)
    for weight, found in ((rows.t(), 1), (rows.t().contiguous(), 0)):
        gm, record, result = substitute(
            lambda x, weight=weight: torch.addmm(BIAS[:40], x, weight), x, kernels=[SPEC], inference=True
        )
        assert record.changed == found and ("addmm" in gm.code) == (not found)
        torch.testing.assert_close(result, torch.addmm(BIAS[:40], x, weight), rtol=1e-5, atol=1e-4)
    for options in ({"alpha": 2}, {"beta": 0}):
        _, record, _ = substitute(
            lambda x, options=options: torch.addmm(BIAS[:40], x, rows.t(), **options), x, kernels=[SPEC], inference=True
        )
        assert record.changed == 0


@pytest.mark.parametrize(("rows", "needs_gradient"), [(17, False), (1, True)])
def test_many_rows_and_training_are_none_of_its_business(rows, needs_gradient):
    x = torch.randn(rows, 512, requires_grad=needs_gradient)
    _, record, _ = substitute(lambda x: F.linear(x, WEIGHT), x, kernels=[SPEC], asked=False)
    assert record.changed == 0 and record.notes == ()


@pytest.mark.parametrize(
    ("rows", "dtype", "fuses", "said"),
    [
        (1, torch.float32, True, None),
        (16, torch.float32, True, None),
        (8, torch.bfloat16, True, None),
        (9, torch.bfloat16, True, "torch's product is as fast"),
        (1, torch.float16, True, "torch's product is as fast"),
        (1, torch.float32, False, "on the CPU it is the same call"),
    ],
)
def test_it_gains_where_it_reads_faster_than_torch(rows, dtype, fuses, said):
    x, weight = torch.randn(rows, 512, dtype=dtype), torch.randn(1024, 512).to(dtype)
    _, record, _ = substitute(
        lambda x: F.linear(x, weight), x, kernels=[SPEC], asked=False, inference=True, fuses=fuses
    )
    assert record.changed == (said is None)
    assert said is None or said in record.notes[0]


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("dtype", "there", "absent"),
    [
        (torch.float32, "ops.dsgraph.skinny_product.default", "skinny_linear.default"),
        (torch.float16, "cpp_fused_silu_skinny_linear", "ops.dsgraph.skinny"),
    ],
)
def test_inductor_calls_cpp_or_makes_one_loop_of_it(dtype, there, absent):
    from torch._inductor.utils import run_and_get_code

    weight, bias = WEIGHT.to(dtype), BIAS.to(dtype)
    compiled = torch.compile(
        lambda x: F.silu(F.linear(x, weight, bias)), backend="dsgraph", options={"kernels": ["skinny_linear"]}
    )
    x = torch.randn(1, 512).to(dtype)
    torch._dynamo.reset()
    with torch.no_grad():
        result, (code, *_) = run_and_get_code(compiled, x)
    assert there in code and absent not in code
    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-1}
    torch.testing.assert_close(result, F.silu(F.linear(x, weight, bias)), **near)

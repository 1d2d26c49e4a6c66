from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dsgraph.passes.kernels.patterns.few_rows_linear import SPEC
from tests.passes.kernels.test_substitute_kernels import substitute

WEIGHT, BIAS = torch.randn(512, 512), torch.randn(512)


@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_layer_of_few_rows_is_found_and_means_the_same(rows, bias):
    x = torch.randn(1, rows, 512)
    gm, record, result = substitute(lambda x: F.linear(x, WEIGHT, bias).relu(), x, kernels=[SPEC], inference=True)
    assert record.changed == 1 and "few_rows_linear" in gm.code and "linear(" not in gm.code.replace("_linear", "")
    assert torch.equal(result, F.linear(x, WEIGHT, bias).relu())


@pytest.mark.parametrize(("rows", "needs_gradient"), [(17, False), (1, True)])
def test_many_rows_and_training_are_none_of_its_business(rows, needs_gradient):
    x = torch.randn(rows, 512, requires_grad=needs_gradient)
    _, record, _ = substitute(lambda x: F.linear(x, WEIGHT), x, kernels=[SPEC], asked=False)
    assert record.changed == 0 and record.notes == ()


@pytest.mark.parametrize(
    ("slow", "rows", "fuses", "said"),
    [
        (True, 1, True, None),
        (False, 1, True, "torch's product reads the weight as fast"),
        (True, 2, True, "torch's product reads the weight as fast"),
        (True, 1, False, "on the CPU it is the same call"),
    ],
)
def test_it_gains_where_torch_reads_slowly(slow, rows, fuses, said):
    x = torch.randn(rows, 512)
    _, record, _ = substitute(
        lambda x: F.linear(x, WEIGHT), x, kernels=[SPEC], asked=False, inference=True, fuses=fuses, slow_rows=slow
    )
    assert record.changed == (said is None)
    assert said is None or said in record.notes[0]


@pytest.mark.inductor
def test_inductor_makes_one_loop_of_it():
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(
        lambda x: F.silu(F.linear(x, WEIGHT, BIAS)), backend="dsgraph", options={"kernels": ["few_rows_linear"]}
    )
    x = torch.randn(1, 512)
    torch._dynamo.reset()
    with torch.no_grad():
        result, (code, *_) = run_and_get_code(compiled, x)
    assert "cpp_fused_few_rows_linear_silu" in code and "ops.dsgraph.few_rows_linear" not in code
    torch.testing.assert_close(result, F.silu(F.linear(x, WEIGHT, BIAS)), rtol=1e-5, atol=1e-4)

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsgraph.passes.kernels.registry import KERNELS
from tests.inductor_ext.kernels.checks import assert_as_near, gradients
from tests.inductor_ext.kernels.test_layouts import N, calls

from . import test_bias_gelu, test_geglu, test_swiglu

# Kernels that Inductor traces through; one that draws random numbers is compared by its own tests.
FUSED = [spec for spec in KERNELS if spec.name in calls(torch.zeros(1, N)) and spec.name != "softmax_dropout"]
# Files of tests of pointwise kernels, each with the options of its op.
POINTWISE = [(file, way) for file in (test_swiglu, test_geglu, test_bias_gelu) for way in file.WAYS]


def _name(item: Any) -> str | None:
    return item.__name__.rpartition(".")[2] if hasattr(item, "__name__") else "-".join(item.values()) or "only"


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(("file", "way"), POINTWISE, ids=_name)
def test_values_and_gradients_are_those_of_plain_torch(file, way, number):
    inputs = file.inputs(file.SHAPES[number], torch.float32)
    y, plain = file.OP(*inputs, **way, dtype=torch.float32), file.plain(*inputs, **way)
    assert torch.equal(y, plain)
    torch.testing.assert_close(gradients(y, inputs), gradients(plain, inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("file", "way"), POINTWISE, ids=_name)
def test_low_precision_is_as_near_to_float32_as_plain_torch(file, way, dtype):
    low = file.inputs((64, 64), dtype)
    wide = tuple(item.detach().float().requires_grad_() for item in low)
    ours, plain, truth = file.OP(*low, **way, dtype=dtype), file.plain(*low, **way), file.plain(*wide, **way)
    assert_as_near([ours, *gradients(ours, low)], [plain, *gradients(plain, low)], [truth, *gradients(truth, wide)])


@pytest.mark.parametrize(("file", "way"), POINTWISE, ids=_name)
def test_gradients_are_derivatives(file, way):
    inputs = file.inputs((3, 5), torch.float64)
    assert torch.autograd.gradcheck(lambda *given: file.OP(*given, **way, dtype=torch.float64), inputs)


@pytest.mark.parametrize(("file", "way"), POINTWISE, ids=_name)
def test_torch_takes_it_for_a_well_formed_op(file, way):
    inputs = file.inputs((3, 5), torch.float32)
    torch.library.opcheck(file.OP.default, inputs, {**way, "dtype": torch.float32})
    given = (torch.ones(3, 5), *map(Tensor.detach, inputs))
    torch.library.opcheck(getattr(torch.ops.dsgraph, f"{file.OP.__name__}_backward").default, given, way)


@pytest.mark.inductor
@pytest.mark.parametrize("spec", FUSED, ids=lambda spec: spec.name)
def test_inductor_fuses_it_with_its_neighbours(spec):
    from torch._inductor.utils import run_and_get_code

    (x, *others), options = calls(torch.randn(4, 5, N))[spec.name]

    def step(x: Tensor, *others: Any) -> Tensor:
        results = spec.op(x * 2, *others, **options)
        return (results[0] if spec.results > 1 else results).sin()

    torch._dynamo.reset()
    result, (code, *_) = run_and_get_code(torch.compile(step, backend="dsgraph"), x, *others)
    assert f"dsgraph.{spec.name}" not in code
    torch.testing.assert_close(result, step(x, *others), rtol=1e-5, atol=1e-5)

"""The patterns of all kernels: spellings are found and mean the same, near misses are named, others are left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from dsgraph.passes.kernels.registry import KERNELS
from tests.inductor_ext.kernels.checks import assert_as_near, gradients
from tests.passes.kernels.test_substitute_kernels import substitute

from . import (
    test_add_layer_norm,
    test_add_rms_norm,
    test_bias_gelu,
    test_geglu,
    test_layer_norm,
    test_rms_norm,
    test_rope,
    test_softmax_dropout,
    test_swiglu,
)
from .cases import Cases

CASES = (
    *(test_swiglu.CASES, test_geglu.CASES, test_bias_gelu.CASES, test_softmax_dropout.CASES),
    *(test_layer_norm.CASES, test_rms_norm.CASES, test_add_layer_norm.CASES, test_add_rms_norm.CASES),
    *(test_rope.FULL_TABLES, test_rope.HALF_TABLES),
)
# Their spellings differ in what is substituted, or in for what a graph is compiled.
BY_THEMSELVES = {"attention", "linear_cross_entropy", "decode_attention", "skinny_linear"}


def _each(attribute: Callable[[Cases], Iterable[Any]]) -> list[Any]:
    return [
        pytest.param(cases, item, id=f"{cases.spec.name}-{item if isinstance(item, str) else number}")
        for cases in CASES
        for number, item in enumerate(attribute(cases))
    ]


def test_no_kernel_is_forgotten():
    assert {cases.spec.name for cases in CASES} | BY_THEMSELVES == {spec.name for spec in KERNELS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cases", "spelling"), _each(lambda cases: cases.spellings))
def test_every_spelling_is_found_and_means_the_same(cases, spelling, dtype):
    inputs, function = cases.inputs(dtype), cases.spellings[spelling]
    gm, record, result = substitute(function, *inputs, kernels=[cases.spec])
    assert record.changed == 1 and record.notes == ()
    assert not any(name in gm.code for name in cases.gone)
    plain = function(*inputs)
    assert result.dtype == plain.dtype
    learned = [item for item in inputs if item.requires_grad]
    ours, theirs = [result, *gradients(result, learned)], [plain, *gradients(plain, learned)]
    if dtype == torch.float32:
        rtol, atol = cases.tolerance
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
        return
    if spelling in cases.exact:
        assert torch.equal(result, plain)
    wide = [item.detach().float().requires_grad_(item.requires_grad) for item in inputs]
    truth = function(*wide)
    assert_as_near(ours, theirs, [truth, *gradients(truth, [item for item in wide if item.requires_grad])])


@pytest.mark.parametrize(("cases", "near_miss"), _each(lambda cases: cases.near_misses))
def test_near_misses_are_left_alone_and_named(cases, near_miss):
    function, reason = near_miss
    inputs = cases.inputs(torch.float32)
    torch.manual_seed(5)
    gm, record, result = substitute(function, *inputs, kernels=[cases.spec], asked=False)
    assert record.changed == 0 and "dsgraph" not in gm.code and reason in record.notes[0]
    torch.manual_seed(5)
    torch.testing.assert_close(result, function(*inputs), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("cases", "function"), _each(lambda cases: cases.others))
def test_other_uses_of_its_ops_are_none_of_its_business(cases, function):
    inputs = cases.inputs(torch.float32)
    torch.manual_seed(5)
    _, record, result = substitute(function, *inputs, kernels=[cases.spec], asked=False)
    assert record.changed == 0 and record.notes == ()
    torch.manual_seed(5)
    assert torch.equal(result, function(*inputs))

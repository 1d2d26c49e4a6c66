from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsgraph.passes import ParameterSpec

SPEC = ParameterSpec("weight", (4, 4), (2, 4), torch.float32, "0", requires_grad=True)


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "seen", "summed"),
    [
        (None, None, torch.float32, torch.float32),
        (torch.bfloat16, None, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32),
        (None, torch.float64, torch.float32, torch.float64),
    ],
)
def test_what_the_forward_sees_and_what_ranks_sum(param_dtype, reduce_dtype, seen, summed):
    spec = replace(SPEC, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    assert spec.dtypes(torch.float32) == (seen, summed)


def test_a_parameter_without_a_group_is_whole():
    assert (SPEC.placement, replace(SPEC, group="").placement) == ("shard", "whole")

from __future__ import annotations

import pytest
import torch

from dsgraph.partitioning.layout import Layout


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
    layout = Layout(3, (4, 4), param_dtype, reduce_dtype, group="0", outer_groups=())
    assert layout.dtypes(torch.float32) == (seen, summed)

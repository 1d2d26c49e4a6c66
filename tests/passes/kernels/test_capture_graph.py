from __future__ import annotations

import torch

from dsgraph.passes.kernels.capture_graph import same_layout


def test_layouts_are_the_same_only_of_one_shape():
    plain = torch.empty(3, 4)
    assert same_layout(plain, torch.ones(3, 4))
    assert not same_layout(plain, torch.empty(4, 3).T)
    assert not same_layout(plain, torch.empty(6, 4)[:2])
    assert not same_layout(plain, torch.empty(1, 3, 4))
    assert same_layout(torch.empty(1, 4), torch.empty_strided((1, 4), (99, 1)))

from __future__ import annotations

import torch

from dsgraph.compat.autograd import in_transform


def _says(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if in_transform() else x - 1


def test_dynamo_knows_whether_it_is_inside_a_transform():
    x = torch.zeros(2)
    compiled = torch.compile(_says, backend="eager", fullgraph=True)
    mapped = torch.compile(lambda x: torch.vmap(_says)(x), backend="eager", fullgraph=True)
    assert [run(x)[0].item() for run in (_says, compiled, torch.vmap(_says), mapped, compiled)] == [-1, -1, 1, 1, -1]

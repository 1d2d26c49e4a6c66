"""The two ops of a compressed reduction: on the CPU in blocks, as in plain torch."""

from __future__ import annotations

import pytest
import torch

from dsgraph.inductor_ext.collectives.compressed_reduction import (
    average_reference,
    compress_average,
    compress_momentum,
    momentum_reference,
)
from dsgraph.inductor_ext.quant.signs import pack_signs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("count", "ranks"), [(1, 1), (3, 4), (17, 2), (40, 3), (2**18 + 5, 1), (2**19 + 13, 2)])
def test_momentum_is_compressed_in_blocks_as_at_once(count, ranks, dtype):
    torch.manual_seed(0)
    grad = torch.randn(count).to(dtype)
    given = grad, torch.randn(count), torch.randn(count), torch.tensor([0.9, 0.1]), ranks
    for found, wanted in zip(compress_momentum(*given), momentum_reference(*given), strict=True):
        assert torch.equal(found, wanted)
    torch.library.opcheck(compress_momentum, given)


@pytest.mark.parametrize(("n", "own", "ranks"), [(1, 1, 1), (1, 0, 2), (9, 4, 3), (2**18 + 5, 2**18 + 5, 2)])
def test_the_average_is_compressed_in_blocks_as_at_once(n, own, ranks):
    torch.manual_seed(0)
    received = torch.cat([pack_signs(torch.randn(1, n), n) for _ in range(ranks)])
    given = received, torch.randn(own), n
    for found, wanted in zip(compress_average(*given), average_reference(*given), strict=True):
        assert torch.equal(found, wanted)
    torch.library.opcheck(compress_average, given)

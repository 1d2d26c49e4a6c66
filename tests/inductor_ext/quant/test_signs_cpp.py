"""Signs in C++: threads, and what happens where they cannot be built."""

from __future__ import annotations

import pytest
import torch

from dsgraph.inductor_ext.collectives.compressed_reduction import compress_average, compress_momentum
from dsgraph.inductor_ext.quant import signs_cpp
from dsgraph.inductor_ext.quant.signs import pack_signs, unpack_signs

_COUNT = 5 * 2**15 + 13


def _computed() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, _COUNT)
    packed = pack_signs(x, x.numel())
    momentum = compress_momentum(*torch.randn(3, _COUNT).unbind(), torch.tensor([0.9, 0.1]), 2)
    return [*momentum, *compress_average(packed, torch.randn(_COUNT), _COUNT), unpack_signs(packed, _COUNT)]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_threads_change_no_number(threads):
    assert signs_cpp.library() is not None  # a compiler is there wherever tests run
    found = []
    for number in (1, 3):
        threads(number)
        found.append(_computed())
    assert all(map(torch.equal, *found))


def test_torch_computes_the_same_where_nothing_can_be_built(monkeypatch):
    wanted = _computed()

    def refuse(source):
        raise RuntimeError("no compiler\nsecond line")

    monkeypatch.setattr(signs_cpp, "cpp_library", refuse)
    signs_cpp.library.cache_clear()
    try:
        with pytest.warns(
            UserWarning, match=r"packed by torch, several times as slowly.*cannot be built: no compiler$"
        ):
            found = _computed()
    finally:
        signs_cpp.library.cache_clear()
    assert all(map(torch.equal, found, wanted))

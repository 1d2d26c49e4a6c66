"""Signs in C++: what is not computed there, and what happens where it cannot be built."""

from __future__ import annotations

import pytest
import torch

from dsgraph.inductor_ext.collectives.compressed_reduction import compress_momentum
from dsgraph.inductor_ext.quant import signs_cpp
from dsgraph.inductor_ext.quant.signs import pack_signs, unpack_signs


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    from torch._inductor import config, cpp_builder

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config.cpp, "cxx", (None, str(tmp_path / "no-such-compiler")))
    found = (signs_cpp.library, cpp_builder.get_cpp_compiler)
    for function in found:
        getattr(function, "cache_clear", lambda: None)()
    yield
    for function in found:
        getattr(function, "cache_clear", lambda: None)()


def _computed():
    torch.manual_seed(0)
    count = 2 * signs_cpp.FROM + 5
    given = torch.randn(count), torch.randn(count), torch.randn(count), torch.tensor([0.9, 0.1]), 1
    return *compress_momentum(*given), unpack_signs(pack_signs(torch.randn(1, 2**16 + 3), 2**16 + 3), 2**16 + 3)


def test_without_a_compiler_torch_computes_the_same(no_compiler):
    with pytest.warns(UserWarning, match="signs of momentum are packed by torch, .*which cannot be built: "):
        found = _computed()
    signs_cpp.library.cache_clear()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_number(threads):
    torch.set_num_threads(threads)

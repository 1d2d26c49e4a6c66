from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dsgraph.inductor_ext.kernels.decoding import skinny_cpp, vectors_cpp
from dsgraph.inductor_ext.kernels.decoding import skinny_linear as kernel
from tests.inductor_ext.kernels.checks import assert_as_near, run_interpreted

OP = torch.ops.dsgraph.skinny_linear
# Leading dimensions of the input, its columns, rows of the weight.
SHAPES = [((1, 1), 128, 48), ((2,), 130, 17), ((3, 1), 200, 33), ((7,), 90, 18), ((16,), 256, 64), ((), 7, 5)]


def _inputs(shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    lead, k, n = shape
    torch.manual_seed(0)
    return torch.randn(*lead, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)


@pytest.fixture
def no_compiler(monkeypatch):
    """Make the build of the library fail once the fixture is called, so that torch computes."""

    def refuse(source, **options):
        raise RuntimeError("no compiler\nsecond line")

    def begin():
        monkeypatch.setattr(vectors_cpp, "cpp_library", refuse)
        skinny_cpp.library.cache_clear()

    yield begin
    skinny_cpp.library.cache_clear()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_as_near_to_float64_as_plain_torchs(shape, dtype, biased):
    x, weight, bias = _inputs(shape, dtype)
    given = (x, weight, bias if biased else None)
    truth = kernel.reference(*(item if item is None else item.double() for item in given), None)
    plain = torch.nn.functional.linear(*given)
    for found in (OP(*given, None), kernel.traceable(*given, None)):
        if dtype == torch.float32:
            torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-4)
        else:
            assert_as_near([found], [plain], [truth])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_weights_have_a_scale_a_row(shape, dtype):
    x, _, bias = _inputs(shape, dtype)
    packed, scale = torch.randint(-127, 128, (shape[2], shape[1]), dtype=torch.int8), torch.rand(shape[2]) + 0.1
    expected = x.float() @ (packed.float() * scale[:, None]).t() + bias.float()
    near = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for found in (OP(x, packed, bias, scale), kernel.traceable(x, packed, bias, scale)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=near, atol=near * float(expected.abs().max()))


def test_what_the_cpp_would_read_wrongly_is_torchs():
    """Else it would read bytes as other numbers, or past an end."""
    assert skinny_cpp.library() is not None, "there is a compiler where tests run"
    x, weight, bias = _inputs(SHAPES[2], torch.float32)
    packed = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    assert skinny_cpp.takes(x, weight, bias, None) and skinny_cpp.takes(x, packed, bias, torch.ones(33))
    assert not skinny_cpp.takes(x, weight, bias[:1], None)
    assert not skinny_cpp.takes(x, packed, bias, torch.ones(33).bfloat16())
    assert not skinny_cpp.takes(x, packed.view(torch.uint8), bias, torch.ones(33))
    assert not skinny_cpp.takes(x[:, :, :0], weight[:, :0], bias, None)
    assert torch.equal(OP(x[:, :, :0], weight[:, :0], bias, None), bias.expand(3, 1, 33))
    with pytest.raises(RuntimeError, match="the bias is not 33 numbers"):
        skinny_cpp.skinny_product(x, weight, bias[:1], None)


def test_threads_share_the_rows_of_the_weight_and_change_no_number():
    x, weight, bias = torch.randn(3, 257), torch.randn(1031, 257), torch.randn(1031)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(OP(x, weight, bias, None))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[0], torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert torch.equal(*found)


def test_torch_computes_the_same_where_nothing_can_be_built(no_compiler):
    x, weight, bias = _inputs(SHAPES[2], torch.float32)
    packed, scale = torch.randint(-127, 128, (33, 200), dtype=torch.int8), torch.rand(33) + 0.1
    wanted = [OP(x, weight, bias, None), OP(x, packed, bias, scale)]
    no_compiler()
    with pytest.warns(UserWarning, match=r"skinny matmuls are computed by torch.*cannot be built: no compiler$"):
        found = [OP(x, weight, bias, None), OP(x, packed, bias, scale)]
    found += [_without_library(x, weight, bias, None), _without_library(x, packed, bias, scale)]
    for ours, theirs in zip(found, wanted * 2, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-2)


def _without_library(*given):
    """Compute as code that was compiled elsewhere does on a machine without a compiler."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    return skinny_cpp.skinny_product.redispatch(keys, *given)


def test_torch_takes_them_for_well_formed_ops():
    x, weight, bias = _inputs(SHAPES[0], torch.float32)
    packed, scale = torch.randint(-127, 128, weight.shape, dtype=torch.int8), torch.rand(len(weight))
    for op in (OP.default, skinny_cpp.skinny_product):
        torch.library.opcheck(op, (x, weight, bias, None))
        torch.library.opcheck(op, (x, packed, None, scale))


@pytest.mark.parametrize(
    ("x", "weight", "said"),
    [
        (torch.ones(17, 4), torch.ones(3, 4), "its input has 17 rows, where 1 to 16"),
        (torch.ones(0, 4), torch.ones(3, 4), "its input has 0 rows"),
        (torch.ones(1, 4), torch.ones(4), "its weight has 1 dimensions"),
        (torch.ones(1, 4), torch.ones(3, 4).half(), "its input is torch.float32 and its weight torch.float16"),
    ],
)
def test_what_it_cannot_take_is_said(x, weight, said):
    assert said in (kernel.supports(x, weight, None, None) or "")
    assert "its bias has shape [1]" in (kernel.supports(torch.ones(1, 4), torch.ones(3, 4), torch.ones(1), None) or "")


@pytest.mark.slow
def test_the_triton_kernel_gives_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype, biased in itertools.product(
        SHAPES, (torch.float32, torch.float16, torch.bfloat16), (False, True)
    ):
        if dtype == torch.bfloat16 and len(shape[0]) and shape[0][0] > 1:
            continue  # the interpreter's `tl.dot` does not know it
        x, weight, bias = _inputs(shape, dtype)
        given = (x, weight, bias if biased else None, None)
        near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.1}
        torch.testing.assert_close(kernel.launch(*given), kernel.reference(*given), **near)
    x, _, bias = _inputs(SHAPES[2], torch.float32)
    packed, scale = torch.randint(-127, 128, (33, 200), dtype=torch.int8), torch.rand(33) + 0.1
    given = (x, packed, bias, scale)
    torch.testing.assert_close(kernel.launch(*given), kernel.reference(*given), rtol=1e-4, atol=1e-2)

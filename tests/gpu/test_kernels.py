"""Each kernel, forward and backward, against plain torch in float64; none of them waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dsgraph
from tests.gpu.device import error_of, host_waits

pytestmark = pytest.mark.gpu

OPS: Any = torch.ops.dsgraph
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS, WIDTH = 300, 1000
"""Neither is a multiple of a kernel's block."""

assert dsgraph.partition  # registers the ops

Function = Callable[..., Any]


class Kernel(NamedTuple):
    """A kernel and plain torch, each of the same tensors; the op also takes the dtype of its result."""

    name: str
    op: Function
    plain: Function
    shapes: Sequence[tuple[int, ...]]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


ROW, X = (WIDTH,), (ROWS, WIDTH)
KERNELS = [
    Kernel(
        "rms_norm",
        lambda x, w, dtype: OPS.rms_norm(x, w, 1e-6, offset=0.0, norm_dtype=torch.float32, dtype=dtype)[0],
        _norm,
        [X, ROW],
    ),
    Kernel(
        "rms_norm of weights around 0",
        lambda x, w, dtype: OPS.rms_norm(x, w, 1e-6, offset=1.0, norm_dtype=torch.float32, dtype=dtype)[0],
        lambda x, w: _norm(x, w + 1),
        [X, ROW],
    ),
    Kernel(
        "add_rms_norm",
        lambda x, r, w, dtype: OPS.add_rms_norm(x, r, w, 1e-6, offset=0.0, norm_dtype=torch.float32, dtype=dtype)[:2],
        lambda x, r, w: (_norm(x + r, w), x + r),
        [X, X, ROW],
    ),
    Kernel(
        "layer_norm",
        lambda x, w, b, dtype: OPS.layer_norm(x, w, b, 1e-5, dtype=dtype)[0],
        _layer_norm,
        [X, ROW, ROW],
    ),
    Kernel(
        "add_layer_norm",
        lambda x, r, w, b, dtype: OPS.add_layer_norm(x, r, w, b, 1e-5, dtype=dtype)[:2],
        lambda x, r, w, b: (_layer_norm(x + r, w, b), x + r),
        [X, X, ROW, ROW],
    ),
    Kernel("swiglu", lambda a, b, dtype: OPS.swiglu(a, b, dtype=dtype), lambda a, b: F.silu(a) * b, [X, X]),
    *(
        Kernel(
            f"geglu {how}",
            lambda a, b, dtype, how=how: OPS.geglu(a, b, approximate=how, dtype=dtype),
            lambda a, b, how=how: F.gelu(a, approximate=how) * b,
            [X, X],
        )
        for how in ("tanh", "none")
    ),
    *(
        Kernel(
            f"bias_gelu {how}",
            lambda x, b, dtype, how=how: OPS.bias_gelu(x, b, approximate=how, dtype=dtype),
            lambda x, b, how=how: F.gelu(x + b, approximate=how),
            [X, ROW],
        )
        for how in ("tanh", "none")
    ),
]


def results(outputs: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and the gradients of all inputs that take one, for the same gradients of the outputs."""
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], grads)]


def leaves(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


def in_float64(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As leaves; integers stay as they are."""
    return [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in tensors]


def assert_as_near(ours: Sequence[Tensor], plain: Sequence[Tensor], truth: Sequence[Tensor], record: Any) -> None:
    """Ours are as near to float64 as plain torch's in the same dtype, up to two roundings."""
    found = [(error_of(a, t), error_of(b, t)) for a, b, t in zip(ours, plain, truth, strict=True)]
    record(errors=[f"{mine:.2e}" for mine, _ in found], plain_errors=[f"{theirs:.2e}" for _, theirs in found])
    for mine, (error, usual) in zip(ours, found, strict=True):
        assert error <= 1.5 * usual + 2 * torch.finfo(mine.dtype).eps, found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])
def test_a_kernel_is_as_exact_as_plain_torch_and_never_waits(kernel, dtype, device, record):
    inputs = leaves(kernel.shapes, dtype, device)
    wide = in_float64(inputs)
    truth = results(kernel.plain(*wide), wide)
    ours, plain = results(kernel.op(*inputs, dtype=dtype), inputs), results(kernel.plain(*inputs), inputs)
    assert_as_near(ours, plain, truth, record)
    grads = [torch.ones_like(y) for y in ours[: len(ours) - len(inputs)]]

    def step() -> None:
        y = kernel.op(*inputs, dtype=dtype)
        torch.autograd.grad(list(y) if isinstance(y, tuple) else [y], inputs, grads)

    assert host_waits(step) == {}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope(dtype, interleaved, device, record):
    x = torch.randn(2, 100, 3, 64, device=device).to(dtype).transpose(1, 2).requires_grad_()  # heads after time
    angles = torch.randn(1, 100, 32, device=device)
    angles = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 1, 2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)

    def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        turned = torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)
        return x * cos + turned * sin

    def op() -> Tensor:
        return OPS.rope(x, *tables, interleaved=interleaved, inverse=False, dtype=dtype)

    wide = in_float64([x, *tables])
    truth, usual = results(plain(*wide), wide), results(plain(x, *tables), [x])
    assert_as_near(results(op(), [x]), usual, truth, record)
    grad = torch.ones_like(x)
    assert host_waits(lambda: torch.autograd.grad(op(), x, grad)) == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_cross_entropy(dtype, device, record):
    hidden, weight = leaves([(ROWS, 128), (5003, 128)], dtype, device)
    target = torch.randint(5003, (ROWS,), device=device)
    target[::5] = -100

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).to(torch.promote_types(torch.float32, hidden.dtype)), target)

    def op() -> Tensor:
        return OPS.linear_cross_entropy(hidden, weight, target)

    wide = in_float64([hidden, weight])
    ours, usual = results(op(), [hidden, weight]), results(plain(hidden, weight), [hidden, weight])
    assert_as_near(ours, usual, results(plain(*wide), wide), record)
    assert host_waits(lambda: torch.autograd.grad(op(), [hidden, weight])) == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_dropout(dtype, device, record):
    how = {"softmax_dtype": torch.float32, "dtype": dtype}
    x = torch.randn(256, WIDTH, device=device).to(dtype).requires_grad_()
    torch.manual_seed(3)
    y, kept = OPS.softmax_dropout(x, 0.25, **how)
    torch.manual_seed(3)
    assert torch.equal(kept, OPS.softmax_dropout(x, 0.25, **how)[1]), "the seed does not decide what is dropped"
    assert not torch.equal(kept, OPS.softmax_dropout(x, 0.25, **how)[1]), "each call drops the same"
    probabilities = x.detach().double().softmax(-1)
    grad = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, grad)
    through = grad.double() * kept / 0.75
    expected = probabilities * (through - (through * probabilities).sum(-1, keepdim=True))
    record(kept=float(kept.float().mean()))
    found = error_of(y, probabilities * kept / 0.75), error_of(dx, expected)
    record(errors=found)
    assert abs(float(kept.float().mean()) - 0.75) < 0.01
    assert max(found) < max(1e-5, 2 * torch.finfo(dtype).eps), found
    assert host_waits(lambda: torch.autograd.grad(OPS.softmax_dropout(x, 0.25, **how)[0], x, grad)) == {}

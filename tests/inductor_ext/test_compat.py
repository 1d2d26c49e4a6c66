from __future__ import annotations

import torch

from dsgraph.inductor_ext.compat import autograd_in_kernel


@torch.library.custom_op("dsgraph_tests::slope_of_cube", mutates_args=())
def _slope_of_cube(x: torch.Tensor, compiled: bool) -> torch.Tensor:
    cube = torch.compile(_cube, backend="aot_eager") if compiled else _cube
    before = torch._C._dispatch_tls_local_exclude_set().raw_repr()
    with autograd_in_kernel():
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(cube(x).sum(), x)
    assert torch._C._dispatch_tls_local_exclude_set().raw_repr() == before
    assert not (x * x).requires_grad
    return slope


def _cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.ops.dsgraph_tests.slope_of_cube(*ctx.saved_tensors, True)


def test_the_kernel_of_an_op_can_differentiate():
    x = torch.randn(5, requires_grad=True)
    for compiled in (False, True):
        torch.testing.assert_close(torch.ops.dsgraph_tests.slope_of_cube(x, compiled), 3 * x**2)
    (slope,) = torch.autograd.grad(_Cube.apply(x).sum(), x)  # the kernel runs in a backward
    torch.testing.assert_close(slope, 3 * x**2)

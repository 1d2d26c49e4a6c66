from __future__ import annotations

import torch

from dsgraph.inductor_ext.compat import transforms_in_kernel


@torch.library.custom_op("dsgraph_tests::slope_of_cube", mutates_args=())
def _slope_of_cube(x: torch.Tensor, compiled: bool) -> torch.Tensor:
    cube = torch.compile(_cube, backend="aot_eager") if compiled else _cube
    before = torch._C._dispatch_tls_local_exclude_set().raw_repr()
    with transforms_in_kernel(), torch.enable_grad():
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


@torch.library.custom_op("dsgraph_tests::below_two", mutates_args=())
def _below_two(x: torch.Tensor) -> torch.Tensor:
    with transforms_in_kernel():
        return torch.vmap(lambda row: (row.unsqueeze(-1) < 2).float().sum(-1))(x)


@_below_two.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_the_kernel_of_an_op_can_map_in_the_first_run_of_a_graph():
    """AOTAutograd runs a graph with custom ops below a dispatch mode when it runs first."""
    x = torch.tensor([1.0, 3.0])
    assert torch.equal(torch.compile(lambda x: torch.ops.dsgraph_tests.below_two(x) + 1)(x), torch.tensor([2.0, 1.0]))

"""Helpers of the tests of kernels: runs under Triton's interpreter, comparison with float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from dsgraph.launch.pool import Pool

_LIMIT = 280
"""Seconds that an interpreted function may take, and those that its process may take to start."""


class _Interpreter:
    """A process in which Triton kernels run on the CPU."""

    def __init__(self, number: int) -> None:
        torch.set_num_threads(1)

    def call(self, module: str, function: str) -> None:
        torch.manual_seed(0)
        getattr(import_module(module), function)()


@cache
def _interpreter() -> Pool:
    """One process for all kernels, each in modules of its own: to start it takes longer than most of the functions."""
    return Pool(_Interpreter, method="spawn", environ={"TRITON_INTERPRET": "1"})


def run_interpreted(module: str, function: str) -> None:
    """Calls a function of a module in a process in which Triton kernels run on the CPU, always with one seed.

    Triton decides when a kernel is defined whether it interprets it.
    """
    started = _interpreter().start(1, limit=_LIMIT, grace=_LIMIT)
    assert started.are_complete, started
    answers = _interpreter().call("call", module, function, count=1, limit=_LIMIT, grace=_LIMIT)
    assert answers.are_complete, answers.errors or "it died or did not answer"


def assert_as_near(ours: Sequence[Tensor], plain: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """Low-precision results are as near to those in float32 as plain torch's, but for one rounding.

    Args:
        ours: Results of a kernel, bfloat16 or float16.
        plain: Of plain torch in the same dtype.
        truth: Of plain torch in float32 or float64, from the same inputs.
    """
    for mine, theirs, exact in zip(ours, plain, truth, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == exact.shape
        exact = exact.double()
        ulp = exact.abs().amax() * torch.finfo(mine.dtype).eps
        error, allowed = (mine.double() - exact).abs().amax(), (theirs.double() - exact).abs().amax() + ulp
        assert error <= allowed, f"{error} > {allowed}"


def gradients(y: Tensor, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients of a weighted sum of y, equal for all y of one shape, for all existing inputs."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return list(torch.autograd.grad((y * weights).float().sum(), [item for item in inputs if item is not None]))


def saved_bytes(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Return the bytes that autograd saves for the backward, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*inputs)  # the storages live as long as it does
    assert result.requires_grad
    return sum(storages.values())

"""What the tests of kernels share: runs under Triton's interpreter, comparison with float32."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def run_interpreted(module: str, function: str) -> None:
    """Calls a function of a module in a new process, in which Triton kernels run on the CPU, always with one seed.

    Triton decides when a kernel is defined whether it interprets it.
    """
    code = f"import torch; torch.manual_seed(0); from {module} import {function}; {function}()"
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]


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
    """Of a weighted sum of y, the weights the same for all y of one shape, with respect to those inputs that exist."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return list(torch.autograd.grad((y * weights).float().sum(), [item for item in inputs if item is not None]))


def saved_bytes(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Of the memory that autograd keeps for the backward, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*inputs)  # the storages live as long as it does
    assert result.requires_grad
    return sum(storages.values())

"""Inductor traces through a function in place of an op: both lay out what they give in the same way.

Otherwise a view that is one of the op's result is none of the function's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from dsgraph.inductor_ext import register_lowerings
from dsgraph.passes.kernels.registry import register_kernels

N = 8
LAYOUTS = {
    "contiguous": torch.randn(2, 3, 5, N),
    "heads after time": torch.randn(2, 5, 3, N).transpose(1, 2),
    "one of them": torch.randn(1, 1, 3, N).transpose(1, 2),
    "turned round": torch.randn(5, 3, 2, N).permute(2, 1, 0, 3),
    "columns first": torch.randn(2, N, 3, 5).permute(0, 2, 3, 1),
    "every other column": torch.randn(2, 5, 3, 2 * N).transpose(1, 2)[..., ::2],
    "the same again and again": torch.randn(5, 1, N).transpose(0, 1).expand(2, 3, 5, N),
    "a row": torch.randn(N),
}
_NORM = {"offset": 0.0, "norm_dtype": torch.float32}
_TURN = {"inverse": False, "dtype": torch.float32}
_TANH = {"approximate": "tanh"}
_DTYPE = {"dtype": torch.float32}


def calls(x: Tensor) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Op -> arguments, of the layout of x where they are of its shape."""
    w, one = torch.randn(N), torch.ones(*x.shape[:-1], 1)
    cos, sin = torch.randn(2, *x.shape[-2:-1], N)
    return {
        "rms_norm": ((x, w, 1e-6), {**_NORM, **_DTYPE}),
        "rms_norm_backward": ((x, x, w, one), _NORM),
        "layer_norm": ((x, w, w, 1e-6), _DTYPE),
        "layer_norm_backward": ((x, x, w, one, one), {"bias_dtype": torch.float32}),
        "add_rms_norm": ((x, x, w, 1e-6), {**_NORM, **_DTYPE}),
        "add_rms_norm_backward": ((x, x, x, w, one), _NORM),
        "add_layer_norm": ((x, x, w, w, 1e-6), _DTYPE),
        "add_layer_norm_backward": ((x, x, x, w, one, one), {"bias_dtype": torch.float32}),
        "swiglu": ((x, x), _DTYPE),
        "swiglu_backward": ((x, x, x), {}),
        "geglu": ((x, x), {**_TANH, **_DTYPE}),
        "geglu_backward": ((x, x, x), _TANH),
        "bias_gelu": ((x, w), {**_TANH, **_DTYPE}),
        "bias_gelu_backward": ((x, x, w), _TANH),
        "softmax_dropout": ((x, 0.5), {"softmax_dtype": torch.float32, **_DTYPE}),
        "softmax_dropout_backward": ((x, x, x > 0, 0.5), {"softmax_dtype": torch.float32}),
        "rope": ((x, cos, sin), {"interleaved": False, **_TURN}),
        "rope_backward": ((x, cos, sin), {"interleaved": True, **_TURN}),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", calls(torch.zeros(1, N)))
def test_what_inductor_traces_has_the_layout_of_the_op(name, layout):
    register_lowerings()
    register_kernels()
    args, options = calls(LAYOUTS[layout])[name]
    op = getattr(torch.ops.dsgraph, name).default
    torch.manual_seed(0)
    ours = op(*args, **options)
    torch.manual_seed(0)
    traced = decompositions[op](*args, **options)
    assert all(map(torch.equal, pytree.tree_leaves(ours), pytree.tree_leaves(traced)))
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(item) if isinstance(item, Tensor) else item for item in args]
        claimed, traced_by_fakes = op(*given, **options), decompositions[op](*given, **options)
    assert _strides(ours) == _strides(claimed) == _strides(traced) == _strides(traced_by_fakes)


def _strides(results: Any) -> list[list[int]]:
    """Return the strides of each result, of its dimensions with more than one element."""
    return [
        [stride for size, stride in zip(item.shape, item.stride(), strict=True) if size > 1]
        for item in pytree.tree_leaves(results)
    ]

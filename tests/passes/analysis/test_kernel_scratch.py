"""Bounds of scratch memory, compared with the allocations of torch's allocator while a kernel runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from dsgraph.passes.analysis.kernel_scratch import oversized_bytes, scratch_bytes

aten = torch.ops.aten


def _measured(op, *args) -> int:
    """The most bytes alive while an op runs, less what it returns."""
    op(*args)  # what it makes once and keeps
    with torch.profiler.profile(profile_memory=True) as profile:
        result = op(*args)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del result
    return most - now


def _bound(op, *args) -> int:
    graph = make_fx(op, tracing_mode="fake")(*args).graph
    return max((scratch_bytes(node) for node in graph.nodes if node.op == "call_function"), default=0)


def _convolve(x, weight, stride, groups):
    return aten.convolution(x, weight, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], groups)


def _convolve_backward(gradient, x, weight):
    return aten.convolution_backward(
        gradient, x, weight, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )


def _dropped_again(x, state):
    return torch.ops.higher_order.run_with_rng_state(state, aten.native_dropout.default, x, 0.1, True)


def _attended(gradient):
    """Attention's backward on queries, keys and values of one tensor, without what its forward holds."""
    packed = torch.randn(16, 64, 12, 64)
    q, k, v = (x.transpose(1, 2) for x in packed.chunk(3, dim=2))
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return lambda *args: op(*args, 0.0, True), gradient, q, k, v, out, sums


X, WEIGHT, GRADIENT = torch.randn(8, 32, 16, 16), torch.randn(64, 32, 3, 3), torch.randn(8, 64, 16, 16)
MASK = torch.ones(8, 32, 16, 16, dtype=torch.bool)
CASES = {
    "convolution": (lambda x, w: _convolve(x, w, 1, 1), X, WEIGHT),
    "strided": (lambda x, w: _convolve(x, w, 2, 1), X, WEIGHT),
    "depthwise": (lambda x, w: _convolve(x, w, 1, 32), X, torch.randn(32, 1, 3, 3)),
    "float64": (lambda x, w: _convolve(x, w, 1, 1), X.double(), WEIGHT.double()),
    "backward": (_convolve_backward, GRADIENT, X, WEIGHT),
    "backward-of-few-channels": (
        _convolve_backward,
        GRADIENT[:, :8].contiguous(),
        torch.randn(8, 64, 16, 16),
        WEIGHT[:8].repeat(1, 2, 1, 1),
    ),
    "upsampling": (lambda x: F.interpolate(x, scale_factor=2.0), X),
    "loss": (lambda x, y: F.mse_loss(x, y), X, X + 1),
    "dropout": (lambda x: aten.native_dropout(x, 0.1, True), X),
    "dropout-repeated": (_dropped_again, X, torch.get_rng_state()),
    "conversion": (torch.mul, X, MASK),
    "attention": _attended(torch.randn(16, 64, 4, 64).transpose(1, 2)),
    "attention-copied": _attended(torch.randn(16, 4, 64, 64)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bound_holds_and_is_near(case):
    op, *args = CASES[case]
    measured, bound = _measured(op, *args), _bound(op, *args)
    assert measured > 0 and measured <= bound <= 2 * measured + 2**16


def test_the_mean_of_a_loss_keeps_the_memory_of_all_elements():
    graph = make_fx(lambda x, y: F.mse_loss(x, y), tracing_mode="fake")(X, X + 1).graph
    (loss,) = graph.find_nodes(op="call_function", target=aten.mse_loss.default)
    assert oversized_bytes(loss) + 4 == F.mse_loss(X, X + 1).untyped_storage().nbytes()
    assert not oversized_bytes(loss, fused=True)


def test_kernels_of_inductor_hold_nothing():
    graph = make_fx(lambda x, y: F.mse_loss(x, y), tracing_mode="fake")(X, X + 1).graph
    (loss,) = graph.find_nodes(op="call_function", target=aten.mse_loss.default)
    assert scratch_bytes(loss) and not scratch_bytes(loss, fused=True)

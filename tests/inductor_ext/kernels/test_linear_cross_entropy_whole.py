from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

from dsgraph.inductor_ext.kernels.linear_cross_entropy_whole import LEAST_BYTES, whole_grads, whole_rows
from tests.inductor_ext.kernels.test_linear_cross_entropy import OPTIONS, inputs

ops = torch.ops.dsgraph
PLAIN = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0}


@pytest.mark.parametrize("how", OPTIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_computes_what_the_chunks_do(how, bias, dtype, tolerance):
    options = {**PLAIN, **how}
    tensors = inputs(13, 7, 3, dtype=dtype, bias=bias, ignored=0.3, ignore_index=options["ignore_index"])
    detached = [None if tensor is None else tensor.detach() for tensor in tensors]
    weights = torch.rand(13, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    for needs in ([True, True, bias], [False, True, False], [True, False, False]):
        mine = whole_grads(*detached, weights, needs=needs, **options)
        theirs = ops.linear_cross_entropy_grads(*detached, weights, needs=needs, **options)
        for got, expected in zip(mine, theirs, strict=True):
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    got, expected = whole_rows(*detached, **options), ops.linear_cross_entropy_rows(*detached, **options)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("rows", "dtype"), [(LEAST_BYTES // 4 // 64 + 1, torch.float32), (0, torch.float32), (8, torch.float16)], ids=str
)
def test_leaves_to_the_chunks_what_they_do_better(rows, dtype):
    hidden, weight = torch.zeros(rows, 4, dtype=dtype), torch.zeros(64, 4, dtype=dtype)
    target, row_weights = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    assert whole_rows(hidden, weight, target, None, **PLAIN) is NotImplemented
    assert whole_grads(hidden, weight, target, None, row_weights, needs=[True] * 3, **PLAIN) is NotImplemented


class _Head(torch.nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, words, bias=False)

    def forward(self, x, target):
        return functional.cross_entropy(self.head(x), target)


@pytest.mark.inductor
@pytest.mark.parametrize(("words", "calls"), [(64, 0), (70_000, 1)])
def test_inductor_fuses_few_logits_and_calls_the_op_for_many(words, calls):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, alone = _Head(words), _Head(words)
    alone.load_state_dict(model.state_dict())
    x, target = torch.randn(64, 8), torch.randint(words, (64,))
    compiled = torch.compile(model, backend="dsgraph", options={"kernels": ["linear_cross_entropy"], "strict": True})
    with torch._inductor.config.patch(force_disable_caches=True):  # what comes from a cache has no code
        loss, code = run_and_get_code(compiled, x, target)
    expected = alone(x, target)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.head.weight.grad, alone.head.weight.grad, rtol=1e-5, atol=1e-6)
    assert "".join(code).count("dsgraph.linear_cross_entropy_grads.default(") == calls

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory import build_counter
from dsgraph.inductor_ext.kernels import linear_cross_entropy_chunks as chunks
from dsgraph.inductor_ext.kernels.linear_cross_entropy import reference, supports
from dsgraph.inductor_ext.kernels.linear_cross_entropy_chunks import row_chunks, rows_per_chunk

ROOT = Path(__file__).resolve().parents[3]
ops = torch.ops.dsgraph
fused = ops.linear_cross_entropy
ALL = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "logit_scale": 0.7, "ignore_index": 2}
OPTIONS = [{}, *({name: value} for name, value in ALL.items()), ALL]
# (N, V, H): one row, one class, rows no multiple of a chunk's 4 (see `small_chunks`), as many rows as one chunk has.
SHAPES = [(1, 7, 5), (9, 1, 3), (13, 7, 3), (30, 11, 2), (4, 9, 4)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "MIN_ROWS", 4)


def inputs(rows, vocabulary, size, *, dtype=torch.float32, bias=True, ignored=0.0, ignore_index=-100):
    torch.manual_seed(rows * vocabulary + size)
    target = torch.randint(vocabulary, (rows,))
    target[torch.rand(rows) < ignored] = ignore_index
    hidden, weight = torch.randn(rows, size, dtype=dtype), torch.randn(vocabulary, size, dtype=dtype)
    b = torch.randn(vocabulary, dtype=dtype) if bias else None
    return hidden.requires_grad_(), weight.requires_grad_(), target, b if b is None else b.requires_grad_()


def loss_and_gradients(loss, tensors, grad=None, **how):
    value = loss(*tensors, **how)
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return value, torch.autograd.grad(value, wanted, torch.ones_like(value) if grad is None else grad)


def assert_same(tensors, tolerance=1e-5, **how):
    shape = tensors[2].shape if how.get("reduction") == "none" else ()
    grad = torch.randn(shape, dtype=tensors[0].dtype)
    value, gradients = loss_and_gradients(fused, tensors, grad, **how)
    expected, of_expected = loss_and_gradients(reference, tensors, grad, **how)
    for got, wanted in zip((value, *gradients), (expected, *of_expected), strict=True):
        assert got.dtype is wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.covering
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_option_alone_and_all_together(shape, how, reduction):
    for bias, ignored in itertools.product((False, True), (0.0, 0.4)):
        tensors = inputs(*shape, bias=bias, ignored=ignored, ignore_index=how.get("ignore_index", -100))
        assert_same(tensors, reduction=reduction, **how)


@settings(max_examples=200)
@given(
    shape=st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 8)),
    bias=st.booleans(),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    how=st.fixed_dictionaries(
        {},
        optional={
            "label_smoothing": st.floats(0, 1),
            "z_loss": st.floats(0, 0.1),
            "softcap": st.floats(0.5, 50),
            "logit_scale": st.floats(-2, 2),
            "ignore_index": st.integers(-3, 5),
        },
    ),
)
def test_any_combination_of_options(shape, bias, ignored, reduction, how):
    ignore_index = how.get("ignore_index", -100)
    tensors = inputs(*shape, dtype=torch.float64, bias=bias, ignored=ignored, ignore_index=ignore_index)
    assert_same(tensors, 1e-9, reduction=reduction, **how)


def test_reference_is_torch_s_cross_entropy():
    hidden, weight, target, bias = inputs(12, 7, 4, ignored=0.3)
    logits = functional.linear(hidden, weight, bias)
    for reduction in ("mean", "sum", "none"):
        how = {"reduction": reduction, "label_smoothing": 0.2, "ignore_index": -100}
        expected = functional.cross_entropy(logits, target, **how)
        torch.testing.assert_close(reference(hidden, weight, target, bias, **how), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction):
    hidden, weight, target, bias = inputs(9, 7, 3, dtype=torch.float64, ignored=0.2, ignore_index=2)
    assert torch.autograd.gradcheck(
        lambda h, w, b: fused(h, w, target, b, reduction=reduction, **ALL), (hidden, weight, bias)
    )


@pytest.mark.covering
@pytest.mark.parametrize(("dtype", "ulp"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
@pytest.mark.parametrize("how", [{}, {"softcap": 10.0, "label_smoothing": 0.1, "z_loss": 0.001}], ids=str)
@pytest.mark.parametrize("rows", [3, 150])
def test_sixteen_bits_are_as_exact_as_plain_torch(dtype, ulp, how, rows):
    """Error against 32 bits: at most that of logits in 16 bits, and one unit in the last place."""
    exact = inputs(rows, 300, 32, ignored=0.1)
    with torch.no_grad():
        exact = [t.to(dtype).float().requires_grad_() if t.is_floating_point() else t for t in exact]
    rounded = [t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for t in exact]
    truth, of_truth = loss_and_gradients(reference, exact, **how)
    plain, of_plain = loss_and_gradients(reference, rounded, **how)
    value, gradients = loss_and_gradients(fused, rounded, **how)
    assert value.dtype is torch.float32
    assert (value - truth).abs() <= (plain - truth).abs() + 2**-22 * truth.abs()
    for got, usual, wanted in zip(gradients, of_plain, of_truth, strict=True):
        assert got.dtype is dtype
        largest = wanted.abs().max()
        assert (got - wanted).abs().max() <= (usual - wanted).abs().max() + ulp * largest
        assert (got - wanted).norm() <= (usual - wanted).norm() + ulp * wanted.norm()


def test_sums_over_chunks_are_in_32_bits():
    """In 16 bits each of 1000 chunks would round the sum."""
    hidden, weight = torch.ones(4000, 2, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16)
    weight.requires_grad_()
    fused(hidden, weight, torch.zeros(4000, dtype=torch.int64), reduction="sum").backward()
    assert rows_per_chunk(4000, 2, 2, least=4) == 4000
    assert weight.grad.tolist() == [[-2000, -2000], [2000, 2000]]
    wide = torch.zeros(2000, 2, dtype=torch.bfloat16, requires_grad=True)
    fused(hidden, wide, torch.zeros(4000, dtype=torch.int64), reduction="sum").backward()
    assert rows_per_chunk(4000, 2000, 2, least=4) == 4
    assert wide.grad[0].tolist() == [-4000, -4000]  # bfloat16 has no 3998


def test_small_gradients_of_a_mean_survive_float16():
    hidden, weight, target, _ = inputs(400, 5, 4, dtype=torch.float16, bias=False)
    scaled = 2.0**14  # the loss scale: without it the gradients of 400 rows would be next to nothing
    value, (d_hidden, _) = loss_and_gradients(fused, (hidden, weight * 2**-10, target, None), torch.tensor(scaled))
    truth = loss_and_gradients(
        reference, (hidden.float(), weight.float() * 2**-10, target, None), torch.tensor(scaled)
    )[1][0]
    assert (d_hidden - truth).norm() <= 2**-10 * truth.norm()
    assert torch.isfinite(value)


def test_all_rows_ignored():
    hidden, weight, _, bias = inputs(5, 7, 3)
    target = torch.full((5,), -100)
    for reduction, expected in (("mean", "nan"), ("sum", 0.0)):
        value, gradients = loss_and_gradients(fused, (hidden, weight, target, bias), reduction=reduction)
        assert str(value.item()) == str(float(expected))
        assert not any(gradient.any() for gradient in gradients)
    assert not fused(hidden, weight, target, reduction="none").any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_leading_dimensions(reduction):
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(2, 5, 3, 4), torch.randn(7, 4), torch.randint(7, (2, 5, 3))
    hidden.requires_grad_()
    assert_same((hidden, weight, target, None), reduction=reduction)
    assert_same((hidden[:, :-1], weight, target[:, 1:], None), reduction=reduction)  # as next-token prediction slices
    assert torch.equal(fused(hidden.flatten(0, 2), weight, target), fused(hidden, weight, target.flatten()))
    assert_same((hidden[0, 0, 0], weight, target[0, 0, 0], None), reduction=reduction)


@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=3)), ids=str)
def test_frozen_tensors_cost_nothing(needs):
    tensors = inputs(12, 11, 4)
    for tensor, needed in zip((tensors[0], tensors[1], tensors[3]), needs, strict=True):
        tensor.requires_grad_(needed)
    with FlopCounterMode(display=False) as counter:
        value = fused(*tensors)
        if any(needs):
            value.backward()
    assert counter.get_total_flops() == 2 * 12 * 11 * 4 * (1 + needs[0] + needs[1])
    assert [tensor.grad is not None for tensor in (tensors[0], tensors[1], tensors[3])] == list(needs)
    if any(needs):
        assert_same(tensors)


def test_no_gradients_without_need():
    tensors = inputs(12, 11, 4)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        value = fused(*tensors)
    assert counter.get_total_flops() == 2 * 12 * 11 * 4
    assert not value.requires_grad
    torch.testing.assert_close(value, fused(*tensors).detach())
    with torch.inference_mode():
        torch.testing.assert_close(fused(*tensors), value)


def test_none_computes_the_logits_again():
    with FlopCounterMode(display=False) as counter:
        fused(*inputs(12, 11, 4), reduction="none").sum().backward()
    assert counter.get_total_flops() == 4 * 2 * 12 * 11 * 4


def test_backward_may_run_twice():
    hidden, weight, target, bias = inputs(9, 7, 3)
    value = fused(hidden, weight, target, bias)
    first = torch.autograd.grad(value, (hidden, weight, bias), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(value, (hidden, weight, bias))))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction):
    hidden, weight, target, _ = inputs(9, 7, 3)
    value = fused(hidden, weight, target, reduction=reduction).sum()
    (gradient,) = torch.autograd.grad(value, hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives: compute the loss with"):
        gradient.sum().backward()


def test_tied_embedding():
    """The weight is read twice: its gradients add up."""
    target = torch.randint(11, (8,))
    weight = torch.randn(11, 4, requires_grad=True)

    def gradient(loss):
        return torch.autograd.grad(loss(functional.embedding(target, weight).tanh(), weight, target.roll(-1)), weight)

    torch.testing.assert_close(gradient(fused), gradient(reference))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_dtype_of_the_result(reduction):
    tensors = inputs(9, 7, 3)
    for dtype in (torch.bfloat16, torch.float64):
        assert_same(tensors, reduction=reduction, dtype=dtype)


def test_inputs_are_left_alone():
    tensors = inputs(9, 7, 3, ignored=0.3)
    before = [tensor.detach().clone() for tensor in tensors]
    loss_and_gradients(fused, tensors, **{**ALL, "ignore_index": -100})
    assert all(map(torch.equal, tensors, before))


def test_tensors_need_not_be_contiguous():
    hidden, weight, target, _ = inputs(9, 7, 3)
    apart = (hidden.t().contiguous().t(), weight.t().contiguous().t(), target.repeat_interleave(2)[::2], None)
    torch.testing.assert_close(fused(*apart), fused(hidden, weight, target))
    assert_same(apart, reduction="none")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction):
    torch.library.opcheck(fused.default, inputs(9, 7, 3, ignored=0.2, ignore_index=2), {"reduction": reduction, **ALL})


def test_opcheck_of_the_ops_inside():
    tensors = inputs(9, 7, 3, ignored=0.2, ignore_index=2)
    torch.library.opcheck(ops.linear_cross_entropy_rows.default, tensors, ALL)
    how = {"needs": [True, True, True], **ALL}
    grads = (ops.linear_cross_entropy_grads.default, (*tensors, torch.rand(9)), how)
    # The derivative of its gradients, which the last of opcheck's tests asks for, is refused.
    torch.library.opcheck(*grads, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    with torch.no_grad():
        detached = [tensor.detach() for tensor in tensors]
        torch.library.opcheck(grads[0], (*detached, torch.rand(9)), how)


@pytest.mark.covering(1)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(backend, reduction, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *tensors: fused(*tensors, reduction=reduction, label_smoothing=0.1),
        backend=backend,
        fullgraph=True,
        dynamic=dynamic,
    )
    for rows in (9, 14):
        tensors = inputs(rows, 7, 3, ignored=0.2)
        value, gradients = loss_and_gradients(compiled, tensors)
        expected, of_expected = loss_and_gradients(fused, tensors, reduction=reduction, label_smoothing=0.1)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradients, of_expected, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(reduction):
    tensors = inputs(9, 7, 3)
    low = [t.detach().bfloat16().requires_grad_() if t.is_floating_point() else t for t in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        value, gradients = loss_and_gradients(fused, tensors, reduction=reduction)
        assert torch.equal(value, fused(*low, reduction=reduction))
    assert value.dtype is torch.float32
    assert all(gradient.dtype is torch.float32 for gradient in gradients)


def test_the_ops_inside_compute_in_the_dtype_of_their_arguments():
    tensors = inputs(9, 7, 3)
    how = {**ALL, "ignore_index": -100}
    grads = {"needs": [True, True, True], **how}
    weights = torch.rand(9)
    with torch.no_grad():
        expected = [ops.linear_cross_entropy_rows(*tensors, **how)]
        expected += ops.linear_cross_entropy_grads(*tensors, weights, **grads)
        with torch.autocast("cpu", torch.bfloat16):
            got = [ops.linear_cross_entropy_rows(*tensors, **how)]
            got += ops.linear_cross_entropy_grads(*tensors, weights, **grads)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(4, 3, dtype=torch.int32)}, "hidden is torch.int32: cast it to one of torch.float32"),
        ({"weight": torch.zeros(7, 3).double()}, "weight is torch.float64 and hidden torch.float32: cast one of them"),
        ({"bias": torch.zeros(7).half()}, "bias is torch.float16 and hidden torch.float32"),
        ({"target": torch.zeros(4)}, "target is torch.float32, but classes are numbered in torch.int64"),
        ({"weight": torch.zeros(7, 2)}, r"hidden is \[4, 3\] and weight \[7, 2\], but they must be"),
        ({"weight": torch.zeros(7, 3, 1)}, r"hidden is \[4, 3\] and weight \[7, 3, 1\], but they must be"),
        ({"bias": torch.zeros(3)}, r"bias is \[3\], but must be \[V\] for a weight of \[7, 3\]"),
        (
            {"target": torch.zeros(5).long()},
            r"target is \[5\], but must have an element for each row of",
        ),
        ({"reduction": "max"}, "reduction is 'max', but must be one of 'mean', 'sum', 'none'"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5, but must be from 0 to 1"),
        ({"softcap": 0.0}, "softcap is 0.0, but must be above 0"),
    ],
)
def test_wrong_arguments(changes, message):
    call = {"hidden": torch.zeros(4, 3), "weight": torch.zeros(7, 3), "target": torch.zeros(4).long(), **changes}
    with pytest.raises(ValueError, match=f"^linear_cross_entropy: {message}"):
        fused(**call)
    assert supports(**call) is not None


@pytest.mark.parametrize("wrong", [-1, 7])
def test_targets_out_of_range(wrong):
    hidden, weight, target, _ = inputs(9, 7, 3)
    target[4] = wrong
    for how in ({}, {"reduction": "none"}):
        with pytest.raises(IndexError, match=f"target {wrong} is out of range: weight has 7 rows"):
            fused(hidden, weight, target, **how)
    torch.testing.assert_close(
        fused(hidden, weight, target, ignore_index=wrong), reference(hidden, weight, target, ignore_index=wrong)
    )


@pytest.mark.parametrize(
    ("rows", "vocabulary", "size", "expected"),
    [
        (8192, 128_000, 4096, 256),  # 262 rows would balance: 32 chunks of 256
        (8192, 32_000, 4096, 1024),
        (100, 32_000, 64, 100),  # all in one chunk
        (300, 32_000, 64, 150),  # two alike, no remainder of 44
        (1000, 10, 64, 1000),
        (0, 10, 64, 0),
    ],
)
def test_rows_per_chunk(rows, vocabulary, size, expected):
    assert rows_per_chunk(rows, vocabulary, size, least=256) == expected


def test_rows_to_be_ignored_are_left_out():
    target = torch.tensor([3, -100, 1, 0, -100, 5, 6, 2, -100])
    assert [rows.tolist() for rows in row_chunks(target, torch.zeros(7, 3), -100)] == [[0, 2, 3], [5, 6, 7]]
    assert row_chunks(target[:1], torch.zeros(7, 3), -100) == [slice(0, 1)]
    assert row_chunks(target[1:2], torch.zeros(7, 3), -100) == []


@pytest.mark.full  # test_rows_per_chunk has what is in memory at once
@pytest.mark.slow
def test_peak_memory(tmp_path):
    library = build_counter(tmp_path)
    if library is None:
        pytest.skip("no C++ compiler")
    command = [sys.executable, "-m", "tests.inductor_ext.kernels.head_memory", str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peaks = json.loads(done.stdout)
    assert peaks["fused"] < 0.1 * peaks["plain"]

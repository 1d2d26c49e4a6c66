"""Kernels that give several of the values that a graph computes: norms of a sum that the graph reads as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import FileCheck

from dsgraph.passes import PassContext, Phase, Pipeline, Runner
from dsgraph.passes.kernels.registry import KERNELS
from dsgraph.passes.kernels.spec import Match
from dsgraph.passes.kernels.substitute_kernels import SubstituteKernels
from tests.passes.kernels.test_substitute_kernels import norm, substitute

NORM, SUM = (next(spec for spec in KERNELS if spec.name == name) for name in ("rms_norm", "add_rms_norm"))
BOTH = (NORM, SUM)  # whatever the order in which they are asked for


@pytest.fixture
def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape, requires_grad=True) for shape in ((3, 16), (3, 16), (16,)))


def gradients(results: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the gradients of all results, with different weights for their elements."""
    results = [results] if isinstance(results, Tensor) else results
    loss = sum((item.float() * torch.arange(item.numel()).view_as(item).cos()).sum() for item in results)
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


def assert_same(function: Callable[..., Any], result: Any, inputs: tuple[Tensor, ...]) -> None:
    plain = function(*inputs)
    torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(result, inputs), gradients(plain, inputs), rtol=1e-5, atol=1e-5)


def _layer(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    total = residual + x
    return total + norm(total, weight).sin()


def test_whoever_reads_the_sum_reads_the_kernel_s(inputs):
    gm, record, result = substitute(_layer, *inputs, kernels=BOTH)
    FileCheck().check_not("+").check("dsgraph.add_rms_norm.default").check_count("getitem", 2).check("sin").check(
        "+"
    ).run(gm.code)
    assert record.changed == 1 and record.notes == ()
    assert_same(_layer, result, inputs)


def test_a_sum_that_nobody_else_reads_is_given_to_nobody(inputs):
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return norm(x + residual, weight)

    gm, _, result = substitute(function, *inputs, kernels=BOTH)
    FileCheck().check("dsgraph.add_rms_norm.default").check_count("add_rms_norm_default[", 1, exactly=True).run(gm.code)
    assert_same(function, result, inputs)


def test_a_sum_may_be_all_that_is_differentiated(inputs):
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total, norm(total, weight).detach()

    _, record, (total, y) = substitute(function, *inputs, kernels=BOTH)
    assert record.changed == 1
    assert torch.equal(y, function(*inputs)[1])
    assert_same(lambda *given: function(*given)[0], total, inputs)


def test_who_reads_the_sum_early_reads_it_behind_the_kernel(inputs):
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        early = total.cos()
        scale = early.exp()
        return norm(total, weight), scale

    gm, record, result = substitute(function, *inputs, kernels=BOTH)
    FileCheck().check("add_rms_norm").check("getitem").check("cos").check("exp").check("return").run(gm.code)
    assert record.changed == 1
    assert_same(function, result, inputs)


def test_a_cast_on_the_way_that_others_read_stays_behind_the_kernel(inputs):
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        wide = total.float()
        early = wide.cos()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * (wide * root).to(x.dtype), early

    low = tuple(item.detach().bfloat16().requires_grad_() for item in inputs)
    gm, record, result = substitute(function, *low, kernels=BOTH)
    FileCheck().check("add_rms_norm").check("float()").check("cos").check("return").run(gm.code)
    assert record.changed == 1 and all(map(torch.equal, result, function(*low)))


def _early_reader_makes_the_weight(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    total = x + residual
    return norm(total, weight + total.mean())


def _sum_is_the_weight(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    total = x[0] + residual[0]
    return norm(total, total)


def _writes_to_an_addend(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    x = x.clone()
    total = x + residual
    x.mul_(2)
    return norm(total, weight) + x


def _writes_to_the_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    total = x + residual
    total.mul_(2)
    return norm(total, weight)


def _adds_in_place(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    total = x.clone()
    total += residual
    return norm(total, weight)


def _adds_more_of_it(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return norm(torch.add(x, residual, alpha=2), weight)


def _adds_a_row(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return norm(x + residual[:1], weight)


def _adds_another_dtype(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return norm(x + residual.bfloat16(), weight)


def _sums_without_gradient(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        total = x + residual
    return norm(total, weight) + total


def _adds_what_needs_no_gradient(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return norm(x.detach() + residual.detach(), weight)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_early_reader_makes_the_weight, "reads what it computes before"),
        (_sum_is_the_weight, "is not computed on the way from what it reads"),
        (_writes_to_an_addend, "writes to what it reads before it is through"),
        (_writes_to_the_sum, "writes to what it reads before it is through"),
        (_adds_in_place, None),
        (_adds_more_of_it, "what is added is multiplied by 2 first"),
        (_adds_a_row, "it is of the sum of [3, 16] and [1, 16], where one shape is expected"),
        (_adds_another_dtype, "it is of the sum of torch.float32 and torch.bfloat16, where one dtype is expected"),
        (_sums_without_gradient, "gradients are switched on or off inside it"),
        (_adds_what_needs_no_gradient, "needs no gradient, and with the kernel would need one"),
    ],
)
def test_where_the_sum_must_stay_the_norm_alone_is_substituted(inputs, function, reason):
    gm, record, result = substitute(function, *inputs, kernels=BOTH, asked=False, fuses=False)
    assert record.changed == 0 and not any("add_rms_norm" in line for line in gm.code.splitlines())
    sums = [note for note in record.notes if note.startswith("add_rms_norm is not substituted")]
    assert len(sums) == (reason is not None) and all(reason in note for note in sums)
    assert_same(function, result, inputs)
    _, record, result = substitute(function, *inputs, kernels=BOTH)
    assert record.done == ("rms_norm in 1 place, because it was requested: on the CPU it is the same calls",)
    assert_same(function, result, inputs)


def test_a_number_is_no_residual(inputs):
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return norm(x * residual + 1, weight)

    _, record, result = substitute(function, *inputs, kernels=[SUM])
    assert record.notes == ("add_rms_norm was requested, but is not used in this graph",)
    assert_same(function, result, inputs)


def test_what_is_added_to_itself(inputs):
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return norm(x + x, weight) * residual

    _, record, result = substitute(function, *inputs, kernels=[SUM])
    assert record.changed == 1
    assert_same(function, result, inputs)


def test_writes_behind_it_do_no_harm(inputs):
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x * 1
        total = x + residual
        y = norm(total, weight)
        y.add_(total)
        x.mul_(2)
        return y, total, x

    with torch.no_grad():
        _, record, result = substitute(function, *inputs, kernels=[SUM])
        assert record.changed == 1 and all(map(torch.equal, result, function(*inputs)))


def _writes_to_the_sum_later(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    total = x + residual
    y = norm(total, weight)
    total += y.sin()
    return total


def _writes_to_the_input_later(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    total = x * residual
    y = norm(total, weight)
    total[:1].mul_(2)
    return total + y


@pytest.mark.parametrize("function", [_writes_to_the_sum_later, _writes_to_the_input_later])
def test_what_is_written_to_later_is_not_kept_for_a_backward(inputs, function):
    low = tuple(item.detach().bfloat16().requires_grad_() for item in inputs)
    _, record, result = substitute(function, *low, kernels=BOTH)
    assert record.changed == 0
    assert "writes later to what the kernel may keep for its backward and the graph does not" in record.notes[0]
    assert all(map(torch.equal, gradients(result, low), gradients(function(*low), low)))
    with torch.no_grad():  # nothing is kept
        _, record, result = substitute(function, *low, kernels=BOTH)
        assert record.changed == 1 and torch.equal(result, function(*low))


def test_strides_of_the_sum_that_a_view_needs_are_kept(inputs):
    def function(x: Tensor, residual: Tensor, weight: Tensor, *, end: str = "view") -> tuple[Tensor, Tensor]:
        scale, *heads = weight[:4], *(item.unflatten(-1, (4, 4)).transpose(0, 1) for item in (x, residual))
        total = heads[0] + heads[1]
        return getattr(total.transpose(0, 1), end)(3, 16), norm(total, scale)

    _, record, result = substitute(function, *inputs, kernels=[SUM], asked=False)
    assert record.changed == 0 and "depends on strides of its result that are not the kernel's" in record.notes[0]
    assert_same(function, result, inputs)
    _, record, result = substitute(lambda *given: function(*given, end="reshape"), *inputs, kernels=[SUM])
    assert record.changed == 1
    assert_same(function, result, inputs)


def test_results_say_of_themselves_what_the_plain_values_said(inputs):
    seen = {}

    def match(node: Any) -> Match | None:
        found = SUM.match(node)
        if isinstance(found, Match):
            seen.update(y=found.node.meta["example_value"], total=found.others[1].meta["example_value"])
        return found

    low = tuple(item.detach().bfloat16().requires_grad_() for item in inputs)
    gm, _, _ = substitute(_layer, *low, kernels=[replace(SUM, match=match)])
    (call,) = (node for node in gm.graph.nodes if node.target is SUM.op)
    values = {node.args[1]: node.meta["example_value"] for node in call.users}
    for number, plain in ((0, seen["y"]), (1, seen["total"])):
        made = values[number]
        assert (made.shape, made.dtype, made.requires_grad) == (plain.shape, plain.dtype, plain.requires_grad)


def test_a_second_run_changes_nothing(inputs):
    gm, _, _ = substitute(_layer, *inputs, kernels=BOTH)
    runner = Runner(Pipeline([SubstituteKernels()]))
    runner.run(gm, PassContext(Phase.CAPTURE))
    assert runner.records[-1].changed == 0 and runner.records[-1].notes == ()


def test_a_norm_counts_as_found_where_the_larger_kernel_took_its_places(inputs):
    _, record, _ = substitute(_layer, *inputs, kernels=BOTH)
    assert record.notes == () and record.done[0].startswith("add_rms_norm in 1 place")
    _, record, _ = substitute(lambda x, r, w: norm(x, w) * r, *inputs, kernels=BOTH)
    assert record.notes == ("add_rms_norm was requested, but is not used in this graph",)
    _, record, _ = substitute(_layer, *inputs, kernels=[NORM])
    assert record.done[0].startswith("rms_norm in 1 place")


def test_batches_of_any_size_share_the_graph(inputs):
    options = {"codegen": "eager", "kernels": ["rms_norm", "add_rms_norm"], "strict": True}
    torch._dynamo.reset()
    compiled = torch.compile(_layer, backend="dsgraph", options=options, dynamic=True)
    for rows in (3, 5, 8):
        given = (torch.randn(rows, 16, requires_grad=True), torch.randn(rows, 16, requires_grad=True), inputs[2])
        assert_same(_layer, compiled(*given), given)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, r, w: ((total := x + r), norm(total, w).detach())[0],
        lambda x, r, w: ((total := x + r).detach(), norm(total, w))[1],
        lambda x, r, w: (norm(x + r, w), x + r)[0],
        _layer,
    ],
)
def test_behind_the_backend_as_well_whatever_is_differentiated(inputs, function):
    options = {"codegen": "eager", "kernels": ["rms_norm", "add_rms_norm"], "strict": True}
    torch._dynamo.reset()
    assert_same(function, torch.compile(function, backend="dsgraph", options=options)(*inputs), inputs)

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

from dsgraph.passes import PassContext, PassRecord, Phase, Pipeline, Runner
from dsgraph.passes.kernels.registry import KERNELS
from dsgraph.passes.kernels.spec import KernelSpec, Match, NearMiss
from dsgraph.passes.kernels.substitute_kernels import SubstituteKernels

RMS_NORM = next(spec for spec in KERNELS if spec.name == "rms_norm")


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def substitute(
    function: Callable[..., Any],
    *inputs: Tensor,
    kernels: Sequence[KernelSpec] = KERNELS,
    asked: bool = True,
    **facts: Any,
) -> tuple[GraphModule, PassRecord, Any]:
    """The graph of `function` as Dynamo captures it after the pass, what the pass did, and what the graph computes."""
    seen: list[tuple[GraphModule, PassRecord]] = []

    def backend(gm: GraphModule, _: Sequence[Any]) -> GraphModule:
        runner = Runner(
            Pipeline([SubstituteKernels(tuple(kernels), asked=tuple(spec.name for spec in kernels) * asked)])
        )
        runner.run(gm, PassContext(Phase.CAPTURE, **facts))
        seen.append((gm, runner.records[-1]))
        return gm

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    ((gm, record),) = seen
    return gm, record, result


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 16, requires_grad=True), torch.randn(16, requires_grad=True)


def test_one_op_stands_for_many(inputs):
    gm, record, result = substitute(norm, *inputs, kernels=[RMS_NORM])
    FileCheck().check("dsgraph.rms_norm.default").check_same("norm_dtype").check("getitem").check("return").run(gm.code)
    FileCheck().check_not("rsqrt").check_not("mean").check_not("pow").run(gm.code)
    assert record.changed == 1 and record.notes == ()
    assert record.done == ("rms_norm in 1 place, because it was requested: on the CPU it is the same calls",)
    assert torch.equal(result, norm(*inputs))


def test_gradients_are_those_of_what_it_replaces(inputs):
    _, _, result = substitute(norm, *inputs)
    weights = torch.randn_like(result)
    ours = torch.autograd.grad((result * weights).sum(), inputs)
    plain = torch.autograd.grad((norm(*inputs) * weights).sum(), inputs)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_a_second_run_changes_nothing(inputs):
    gm, _, _ = substitute(norm, *inputs)
    runner = Runner(Pipeline([SubstituteKernels()]))
    runner.run(gm, PassContext(Phase.CAPTURE))
    assert runner.records[-1].changed == 0 and runner.records[-1].notes == ()


def test_bodies_of_checkpoint_regions_count(inputs):
    gm, record, result = substitute(lambda x, w: checkpoint(norm, x, w, use_reentrant=False), *inputs)
    assert record.changed == 1 and torch.equal(result, norm(*inputs))
    assert "rms_norm" not in gm.code and any("rms_norm" in body.code for body in gm.children())


def _reads_in_between(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * root) + root


def _writes_to_the_input(x: Tensor, weight: Tensor) -> Tensor:
    x = x.clone()
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.mul_(2)
    return weight * (x * root)


def _writes_to_a_view_of_the_input(x: Tensor, weight: Tensor) -> Tensor:
    x = x.clone()
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x[0][:] = 0
    return weight * (x * root)


def _writes_on_the_way(x: Tensor, weight: Tensor) -> Tensor:
    root = x.pow(2).mean(-1, keepdim=True).add_(1e-6).rsqrt()
    return weight * (x * root)


def _statistics_without_gradient(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (x * root)


def _partly_under_autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (x * root)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_reads_in_between, "which it computes on the way, is read by"),
        (_writes_to_the_input, "writes to what it reads before it is through"),
        (_writes_to_a_view_of_the_input, "writes to what it reads before it is through"),
        (_statistics_without_gradient, "gradients are switched on or off inside it"),
        (_partly_under_autocast, "a context begins or ends inside it"),
    ],
)
def test_what_would_not_be_the_same_is_left_alone_and_said(inputs, function, reason):
    gm, record, result = substitute(function, *inputs, kernels=[RMS_NORM], asked=False)
    assert "dsgraph" not in gm.code and record.changed == 0
    (note,) = record.notes
    assert note.startswith("rms_norm is not substituted (test_substitute_kernels.py:") and reason in note
    assert torch.equal(result, function(*inputs))


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_what_torch_func_transforms_is_left_alone(inputs, transform):
    x, weight = (item.detach() for item in inputs)

    def function(x: Tensor) -> Tensor:
        return transform(lambda row: norm(row, weight))(x)

    _, record, result = substitute(function, x, kernels=[RMS_NORM], asked=False)
    assert record.changed == 0 and "inside a transform of torch.func" in record.notes[0]
    torch.testing.assert_close(result, function(x))


def _heads_behind_time(
    x: Tensor, weight: Tensor, *, end: str, then: Callable[[Tensor], Tensor] = lambda heads: heads * 2
) -> Tensor:
    heads = norm(x.unflatten(-1, (4, 4)).transpose(0, 1), weight[:4])  # [time, heads, n] as [heads, time, n]
    return getattr(then(heads).transpose(0, 1), end)(3, 16)


def test_strides_that_a_view_needs_are_kept(inputs):
    view, reshape = (partial(_heads_behind_time, end=end) for end in ("view", "reshape"))
    _, record, result = substitute(view, *inputs, kernels=[RMS_NORM], asked=False)
    assert record.changed == 0 and "depends on strides of its result that are not the kernel's" in record.notes[0]
    assert torch.equal(result, view(*inputs))
    _, record, result = substitute(reshape, *inputs, kernels=[RMS_NORM])
    assert record.changed == 1 and torch.equal(result, reshape(*inputs))


@pytest.mark.parametrize(
    "then",
    [
        torch.tanh,
        torch.relu,
        lambda heads: torch.sort(heads).values,
        lambda heads: heads * torch.ones(2, 1, 1, 1)[1],
        lambda heads: (heads + torch.ones(2, 1, 1, 1))[1],
    ],
)
def test_strides_are_handed_on_by_whatever_keeps_them(inputs, then):
    view = partial(_heads_behind_time, end="view", then=then)
    _, record, result = substitute(view, *inputs, kernels=[RMS_NORM])
    assert record.changed == 0 and "depends on strides of its result" in record.notes[0]
    assert torch.equal(result, view(*inputs))


def test_strides_end_where_a_copy_orders_them(inputs):
    view = partial(
        _heads_behind_time, end="view", then=lambda heads: heads.transpose(0, 1).contiguous().transpose(0, 1)
    )
    _, record, result = substitute(view, *inputs, kernels=[RMS_NORM])
    assert record.changed == 1 and torch.equal(result, view(*inputs))


def test_the_value_of_a_kernel_needs_a_gradient_where_the_plain_one_does():
    rope = next(spec for spec in KERNELS if spec.name == "rope")

    def function(x: Tensor, table: Tensor, sin: Tensor) -> Tensor:
        cos = table * torch.rsqrt(table.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin

    x, sin = torch.randn(2, 3, 5, 8), torch.randn(5, 8)
    for needs_gradient in (True, False):
        table = torch.randn(5, 8, requires_grad=needs_gradient)
        _, record, result = substitute(function, x, table, sin, kernels=[RMS_NORM, rope])
        assert record.changed == (1 if needs_gradient else 2)
        assert any("its cosine needs a gradient" in note for note in record.notes) == needs_gradient
        torch.testing.assert_close(result, function(x, table, sin), rtol=1e-6, atol=1e-6)
        if needs_gradient:
            ours, plain = (torch.autograd.grad(y.sin().sum(), table) for y in (result, function(x, table, sin)))
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_in_place_arithmetic_is_no_pattern(inputs):
    gm, record, result = substitute(_writes_on_the_way, *inputs, kernels=[RMS_NORM])
    assert record.changed == 0 and "dsgraph" not in gm.code
    assert torch.equal(result, _writes_on_the_way(*inputs))


def test_a_write_behind_it_does_no_harm(inputs):
    def function(x: Tensor, weight: Tensor) -> Tensor:
        x = x.clone()
        y = norm(x, weight)
        x.mul_(2)
        y.add_(x)
        return y

    _, record, result = substitute(function, *inputs)
    assert record.changed == 1 and torch.equal(result, function(*inputs))


def test_a_cast_that_others_read_stays_for_them(inputs):
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.float()
        return norm(x, weight), wide + (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))

    low = inputs[0].detach().bfloat16()
    _, record, result = substitute(function, low, inputs[1].detach().bfloat16())
    assert record.changed == 2
    assert all(map(torch.equal, result, function(low, inputs[1].detach().bfloat16())))


def test_where_inductor_does_as_well_only_what_was_asked_for_is_substituted(inputs):
    _, record, _ = substitute(norm, *inputs, asked=False, fuses=True)
    assert record.changed == 0
    assert record.notes == (
        "rms_norm is not substituted in 1 place, because nothing is gained: Inductor makes one kernel of it as well",
    )
    _, record, _ = substitute(norm, *inputs, asked=True, fuses=True, kernels=[RMS_NORM])
    assert record.changed == 1


def test_what_was_asked_for_and_is_not_there_is_said(inputs):
    _, record, _ = substitute(lambda x, w: x * w, *inputs, kernels=[RMS_NORM])
    assert record.notes == ("rms_norm was requested, but is not used in this graph",)


@pytest.mark.parametrize("calls", [1, 2])
def test_what_the_graph_calls_by_torchs_own_name_is_not_missing(calls):
    def function(x: Tensor) -> Tensor:
        for _ in range(calls):
            x = checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False)
        return x

    kernels = [spec for spec in KERNELS if spec.name in ("attention", "rms_norm")]
    _, record, _ = substitute(function, torch.randn(1, 2, 4, 8, requires_grad=True), kernels=kernels)
    places = "1 place" if calls == 1 else "2 places"
    assert record.changed == 0 and record.notes == (
        f"attention is not substituted: the graph already calls torch's scaled_dot_product_attention, in {places}",
        "rms_norm was requested, but is not used in this graph",
    )


def _attention(p: float, x: Tensor) -> Tensor:
    return F.dropout((x @ x.transpose(-2, -1)).softmax(-1), p) @ x


def _gate(bias: float, x: Tensor) -> Tensor:
    return F.gelu(x + x.new_full((8,), bias) if bias else x) * x


@pytest.mark.parametrize(
    ("function", "larger", "smaller", "is_there"),
    [
        (partial(_attention, 0.5), "attention", "softmax_dropout", True),
        (partial(_attention, 0.0), "attention", "softmax_dropout", False),
        (partial(_gate, 1.0), "geglu", "bias_gelu", True),
        (partial(_gate, 0.0), "geglu", "bias_gelu", False),
    ],
)
def test_a_kernel_whose_places_a_larger_one_takes_is_not_missing(function, larger, smaller, is_there):
    kernels = [spec for spec in KERNELS if spec.name in (larger, smaller)]
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    assert substitute(function, x, kernels=kernels[1:])[1].changed == is_there
    _, record, _ = substitute(function, x, kernels=kernels)
    assert record.changed == 1 and record.done[0].startswith(larger)
    absent = (f"{smaller} was requested, but is not used in this graph",)
    assert record.notes == (() if is_there else absent)


def test_what_is_not_proved_is_left_to_whoever_asks_for_it(inputs):
    def match(node: Node) -> Match | NearMiss | None:
        found = RMS_NORM.match(node)
        return replace(found, caveat="it rounds otherwise") if isinstance(found, Match) else found

    careful = replace(RMS_NORM, match=match)
    _, record, _ = substitute(norm, *inputs, kernels=[careful], asked=False)
    (note,) = record.notes
    assert record.changed == 0
    assert note.endswith("it rounds otherwise; options={'kernels': ['rms_norm']} substitutes it anyway")
    _, record, _ = substitute(norm, *inputs, kernels=[careful])
    assert record.changed == 1 and record.done[0].endswith("it is the same calls; it rounds otherwise")


def test_what_a_kernel_cannot_take_is_said(inputs):
    picky = replace(RMS_NORM, supports=lambda x, weight, eps, **options: f"its rows have {x.shape[-1]} elements")
    _, record, _ = substitute(norm, *inputs, kernels=[picky], asked=False)
    assert record.changed == 0 and "its rows have 16 elements" in record.notes[0]


def test_a_match_that_answers_with_something_else_is_an_error(inputs):
    wrong = replace(RMS_NORM, match=lambda node: True)
    with pytest.raises(Exception, match=r"kernel 'rms_norm': its match answers True; a Match, a NearMiss or None"):
        substitute(norm, *inputs, kernels=[wrong])


def test_batches_of_any_size_share_the_graph(inputs):
    compiled = torch.compile(
        norm, backend="dsgraph", options={"codegen": "eager", "kernels": ["rms_norm"]}, dynamic=True
    )
    torch._dynamo.reset()
    for rows in (3, 5, 8):
        x = torch.randn(rows, 16)
        assert torch.equal(compiled(x, inputs[1]), norm(x, inputs[1]))


def test_its_identity_for_caches_tells_kernels_apart():
    every, one = SubstituteKernels(), SubstituteKernels((RMS_NORM,), asked=("rms_norm",))
    assert every.fingerprint() is not None and every.fingerprint() == SubstituteKernels().fingerprint()
    assert one.fingerprint() not in (None, every.fingerprint())


def test_it_can_be_sent_to_other_processes():
    for item in (SubstituteKernels(), SubstituteKernels((RMS_NORM,), asked=("rms_norm",))):
        assert pickle.loads(pickle.dumps(item)) == item

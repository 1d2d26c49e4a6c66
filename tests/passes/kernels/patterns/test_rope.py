from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from dsgraph.passes.kernels.patterns.rope import SPEC
from examples.gpt import rotate
from tests.inductor_ext.kernels.checks import gradients
from tests.passes.kernels.patterns.cases import Cases, randn
from tests.passes.kernels.test_substitute_kernels import substitute

N = 8


def _turned(x: Tensor) -> Tensor:
    return torch.cat((-x[..., N // 2 :], x[..., : N // 2]), dim=-1)


def _turned_by_chunk(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat([-x2, x1], -1)


def _turned_by_split(x: Tensor) -> Tensor:
    x1, x2 = torch.split(x, x.shape[-1] // 2, dim=-1)
    return torch.cat((x2.neg(), x1), dim=x.ndim - 1)


def _turned_backwards(x: Tensor) -> Tensor:
    x1, x2 = x.split([N // 2, N // 2], -1)
    return torch.cat((x2, -x1), -1)


def _turned_in_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1).flatten(-2)


def _turned_in_pairs_and_reshaped(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).reshape(x.shape)


def _in_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    return ((wide * cos.float()) + (_turned(wide) * sin.float())).to(x.dtype)


# With tables of as many columns as x.
FULL = {
    "transformers": lambda x, cos, sin: (x * cos) + (_turned(x) * sin),
    "other order": lambda x, cos, sin: sin * _turned_by_chunk(x) + cos * x,
    "split": lambda x, cos, sin: torch.add(x * cos, _turned_by_split(x) * sin),
    "subtracted": lambda x, cos, sin: x * cos - _turned(x) * sin,
    "backwards": lambda x, cos, sin: x * cos + _turned_backwards(x) * sin,
    "backwards, subtracted": lambda x, cos, sin: x * cos - _turned_backwards(x) * sin,
    "in float32": _in_float32,
    "GPT-J": lambda x, cos, sin: x * cos + _turned_in_pairs(x) * sin,
    "pairs, reshaped": lambda x, cos, sin: x * cos + _turned_in_pairs_and_reshaped(x) * sin,
}


def _nanochat(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x[..., : N // 2], x[..., N // 2 :]
    return torch.cat([x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos], 3)


def _negated_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2 * sin + x1 * cos, sin * x1 + cos * x2), -1)


def _pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1).flatten(3)


def _halves_of_full_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.cat((cos, cos), -1)[..., : N // 2], torch.cat((sin, sin), -1)[..., : N // 2]
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1)


# With tables of half as many columns.
HALVES = {
    "examples.gpt": lambda x, cos, sin: rotate(x, torch.atan2(sin, cos)[0, 0].float()),
    "nanochat": _nanochat,
    "negated first": _negated_first,
    "pairs": _pairs,
    "halves of full tables": _halves_of_full_tables,
}


def _inputs(dtype: torch.dtype, columns: int = N) -> tuple[Tensor, ...]:
    x, cos, sin = randn((2, 3, 5, N), (2, 1, 5, columns), (2, 1, 5, columns), dtype=dtype)
    return x, cos.detach(), sin.detach()


def test_queries_and_keys_share_their_tables():
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin

    q, cos, sin = _inputs(torch.float32)
    inputs = q, q[:, :1] + 1, cos[:, 0], sin[:, 0]
    gm, record, result = substitute(function, *inputs, kernels=[SPEC])
    assert record.changed == 2 and "cat" not in gm.code
    assert all(map(torch.equal, result, function(*inputs)))


def test_a_part_of_the_columns():
    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turning, passing = x[..., :N], x[..., N:]
        return torch.cat((turning * cos + _turned(turning) * sin, passing), -1)

    x, cos, sin = _inputs(torch.float32)
    x = torch.cat((x, x), -1)
    _, record, result = substitute(function, x, cos, sin, kernels=[SPEC])
    assert record.changed == 1 and record.notes == () and torch.equal(result, function(x, cos, sin))


def _other_signs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos + x2 * sin, x1 * sin + x2 * cos), -1)


def _other_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * (cos * 2)), -1)


def _halves_joined_as_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).flatten(-2)


def _pairs_joined_as_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat((-x[..., 1::2], x[..., ::2]), -1) * sin


def _others_read_what_is_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = _turned(x)
    return x * cos + turned * sin + turned


def _wider_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x[:1, :1]
    return x * cos + _turned(x) * sin


def _written_to_in_between(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.clone()
    turned = _turned(x)
    x[..., 0] = 0
    return x * cos + turned * sin


def test_learned_tables_are_left_alone():
    x, cos, sin = _inputs(torch.float32)
    _, record, _ = substitute(FULL["transformers"], x, cos.requires_grad_(), sin, kernels=[SPEC], asked=False)
    assert record.changed == 0 and "its cosine needs a gradient" in record.notes[0]


def test_tables_of_no_dimension_are_left_alone():
    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1)

    inputs = torch.randn(3, 2), torch.tensor(0.6), torch.tensor(0.8)
    _, record, result = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and "its cosine has no dimension" in record.notes[0]
    assert torch.equal(result, function(*inputs))


@pytest.mark.full  # tests/inductor_ext/kernels/test_rope.py has strides, test_every_kernel.py the fusion
@pytest.mark.inductor
def test_inductor_keeps_the_layout_of_heads_behind_time():
    from torch._inductor.utils import run_and_get_code

    def function(p: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [batch, time, heads * n] -> the same
        q = p.view(2, 5, 3, N).transpose(1, 2)
        return (q * cos + _turned(q) * sin).transpose(1, 2).view(2, 5, 3 * N)

    p, (cos, sin) = torch.randn(2, 5, 3 * N), torch.randn(2, 5, N)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="dsgraph", options={"kernels": ["rope"]})
    result, (code, *_) = run_and_get_code(compiled, p, cos, sin)
    torch.testing.assert_close(result, function(p, cos, sin), rtol=1e-6, atol=1e-6)
    assert "dsgraph.rope" not in code and code.count(" = empty_strided_cpu(") == 1  # the result, and no copy of it
    assert code.count("cpp_fused_") > 0 and len(set(re.findall(r"cpp_fused_\w+", code))) == 1
    p.requires_grad_()
    ours, theirs = (gradients(call(p, cos, sin), [p]) for call in (compiled, function))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


_OTHERS = [
    lambda x, c, s: torch.cat((x * c, x * s), -1),
    lambda x, c, s: torch.cat((-x[..., :4], x[..., 4:]), -1) * s + x * c,
    lambda x, c, s: torch.cat((-x[..., 4:], x[..., :4]), 0),
    lambda x, c, s: torch.cat((-x[..., 5:], x[..., :5]), -1) * s + x * c,
    lambda x, c, s: _turned(x) * s - x * c,
    lambda x, c, s: torch.stack((x, x), -1).flatten(-2),
]

FULL_TABLES = Cases(
    SPEC,
    _inputs,
    spellings=FULL,
    gone=("stack", "chunk"),
    near_misses=[
        (_pairs_joined_as_halves, "takes its input apart by neighbours and puts it together by halves"),
        (lambda x, c, s: (x + 1) * c + _turned(x) * s, "what is turned is not what is multiplied by the cosine"),
        (lambda x, c, s: x * c[..., :1] + _turned(x) * s[..., :1], "have 1 columns, where 8 were expected"),
        (_others_read_what_is_turned, "which it computes on the way, is read by"),
        (_written_to_in_between, "writes to what it reads before it is through"),
        (_wider_tables, "its tables make [2, 1, 5, 8] of its input"),
    ],
    others=_OTHERS,
)
HALF_TABLES = Cases(
    SPEC,
    lambda dtype: _inputs(dtype, N // 2),
    spellings=HALVES,
    gone=("stack", "chunk"),
    near_misses=[
        (_other_signs, "its signs are not those of a rotation"),
        (_other_tables, "its halves are not multiplied by the same cosine and sine"),
        (_halves_joined_as_pairs, "takes its input apart by halves and puts it together by neighbours"),
    ],
)

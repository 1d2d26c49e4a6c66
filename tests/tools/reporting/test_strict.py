"""Errors of `strict=True`. The models are those of the report's tests, which show the same without it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dsgraph
from dsgraph.tools.reporting.text import fit
from tests.names import reported
from tests.tools.reporting.test_report import (
    EAGER,
    HERE,
    BreaksFirst,
    Loops,
    Net,
    _break,
    _compiled,
    _line,
    _with_region,
    keep_exp,
)

pytestmark = pytest.mark.slow

STRICT = {**EAGER, "strict": True}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def _refused(compiled, *inputs) -> str:
    with pytest.raises(Exception, match="strict: ") as caught:
        compiled(*inputs)
    return str(caught.value)


def test_strict_refuses_graph_breaks(fake_ranks):
    text = _refused(_compiled(Net(_break), strict=True), torch.ones(2, 8))
    assert f"{HERE}:{_line('the break')} (_break)" in text and "graph_break()" in text and "Change that line" in text


def test_strict_refuses_what_follows_a_break_with_nothing_ahead_of_it(fake_ranks):
    text = _refused(_compiled(BreaksFirst(), strict=True), torch.ones(2, 8))
    assert f"{HERE}:{_line('the first break')} ({reported('BreaksFirst.forward')})" in text and "graph_break()" in text


def test_strict_refuses_what_dynamo_gave_up_on(fake_ranks):
    class Inner(Net):
        pass

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            for _ in range(2):
                x = torch.tanh(x)
                torch._dynamo.graph_break()
            return self.inner(x)

    text = _refused(_compiled(Outer(), strict=True), torch.ones(2, 8))
    assert "Dynamo gave up on" in text and "forward" in text


def test_strict_does_not_mind_what_dynamo_gave_up_on_elsewhere(fake_ranks):
    _compiled(Loops())(torch.ones(2, 8))
    _compiled(strict=True)(torch.ones(2, 8))


def test_strict_bounds_recompiles(fake_ranks):
    model = Net()
    model._between = lambda h: h * model.factor
    compiled = torch.compile(dsgraph.partition(model), backend="dsgraph", options={**STRICT, "recompile_limit": 2})
    for factor in (1, 2):
        model.factor = factor
        compiled(torch.ones(2, 8))
    model.factor = 3
    text = _refused(compiled, torch.ones(2, 8))
    assert "compile 3 of" in text and "'recompile_limit' is 2" in text and "factor == 2" in text


def test_strict_ends_before_dynamo_would_run_the_function_uncompiled(fake_ranks):
    model = Net()
    model._between = lambda h: h * model.factor
    compiled = torch.compile(dsgraph.partition(model), backend="dsgraph", options=STRICT)
    with torch._dynamo.config.patch(recompile_limit=3):
        for factor in range(2):
            model.factor = factor
            compiled(torch.ones(2, 8))
        model.factor = 2
        assert "recompile_limit is 3: this would be the last time" in _refused(compiled, torch.ones(2, 8))


def test_strict_lets_a_good_model_pass(fake_ranks):
    compiled = _compiled(Net(lambda h: checkpoint(torch.sin, h, use_reentrant=False)), strict=True)
    compiled(torch.ones(2, 8)).backward()
    with torch.no_grad():
        compiled(torch.ones(2, 8))
    with dsgraph.accumulate(compiled._orig_mod):
        compiled(torch.ones(2, 8)).backward()


def test_strict_refuses_values_that_are_kept_in_spite_of_their_region(fake_ranks):
    compiled = _compiled(_with_region(), pipeline=dsgraph.default_pipeline() + [keep_exp], strict=True)
    text = _refused(compiled, torch.ones(2, 8))
    assert "exp (128 bytes" in text and f"{HERE}:{_line('exp')}" in text


def test_strict_refuses_a_kernel_that_is_found_nowhere():
    class Halved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)

    torch._dynamo.reset()
    options = {"codegen": "eager", "strict": True, "kernels": ["rms_norm"]}
    with pytest.raises(
        Exception, match=r"strict: kernel rms_norm was requested, but is not used in this graph"
    ) as caught:
        torch.compile(Halved(), backend="dsgraph", options=options)(torch.randn(4, 8))
    assert "its mean is over dimension 0, not over the last" in str(caught.value)
    relaxed = torch.compile(Halved(), backend="dsgraph", options=options | {"strict": False})
    torch._dynamo.reset()
    x = torch.randn(4, 8)
    assert torch.equal(relaxed(x), Halved()(x))


class _Stack(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_NormBlock(dim) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Normed(nn.Module):
    """Blocks with a norm over a dimension, of which the kernel computes the last, and a layer before them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.stack = nn.Linear(8, 8), _Stack(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(torch.tanh(self.first(x))).sum()


class _NormBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear, self.dim = nn.Linear(8, 8), dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return h * torch.rsqrt(h.pow(2).mean(self.dim, keepdim=True) + 1e-6)


@pytest.mark.parametrize("dim", (-1, 0))
def test_strict_looks_for_a_kernel_in_all_graphs_of_a_model_with_blocks(fake_ranks, dim):
    model = dsgraph.partition(_Normed(dim), stage=3, keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={**STRICT, "kernels": ["rms_norm"]})
    loss = compiled(torch.randn(4, 8))
    if dim == -1:
        loss.backward()
        return
    with pytest.raises(dsgraph.StrictError, match=r"kernel rms_norm was requested.* and \d more: .*not over the last"):
        loss.backward()


def test_strict_lets_a_model_pass_that_calls_torchs_attention_itself():
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    torch._dynamo.reset()
    options = {"codegen": "eager", "strict": True, "kernels": ["attention"]}
    compiled, x = torch.compile(Attention(), backend="dsgraph", options=options), torch.randn(1, 2, 4, 8)
    assert torch.equal(compiled(x), Attention()(x))
    said = " ".join(str(dsgraph.report(compiled)).split())
    assert "the graph already calls torch's scaled_dot_product_attention, in 1 place" in said


def test_strict_refuses_options_without_effect(fake_ranks):
    model = dsgraph.partition(nn.Sequential(nn.Linear(4, 4)), stage=1)
    compiled = torch.compile(model, backend="dsgraph", options={**STRICT, "partition_activations": True})
    with pytest.raises(dsgraph.StrictError, match="option 'partition_activations' has no effect"):
        compiled(torch.ones(1, 4))


def test_strict_names_the_users_line_where_torchs_module_is_compiled(fake_ranks):
    model = dsgraph.partition(nn.Sequential(nn.Linear(4, 4)), stage=1)
    compiled = torch.compile(model, backend="dsgraph", options={**STRICT, "recompile_limit": 1}, dynamic=False)
    compiled(torch.ones(1, 4))
    with pytest.raises(dsgraph.StrictError, match=r"compile 2 of what .*test_strict\.py"):
        compiled(torch.ones(2, 4))


def test_a_cut_name_keeps_its_phase():
    assert fit("backward of a/very/long/path.py:12 (f)", 24) == "backward of ...py:12 (f)"
    assert fit("forward of f", 24) == "forward of f"

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import dsgraph
from dsgraph.compiler.memory_limit.limit_scope import refuse_memory_budget
from dsgraph.utils.errors import OptionError

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]

WIDTH = 32


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class _Blocks(nn.Module):
    def __init__(self, unused: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        if unused:
            self.pooler = nn.Linear(unused, unused, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def _compiled(limit, module: nn.Module | None = None, **options):
    torch._dynamo.reset()
    model = dsgraph.partition(module or _Blocks(), stage=3, blocks="none")
    options = {"codegen": "eager", "memory_limit": limit, **options}
    return model, torch.compile(model, backend="dsgraph", options=options)


def _step(compiled, rows: int) -> None:
    compiled(torch.randn(rows, WIDTH)).backward()
    compiled.zero_grad()


def _least(rows: int, module: nn.Module | None = None, **options) -> int:
    _, compiled = _compiled(1000, module, **options)
    with pytest.raises(Exception, match="a step takes") as refused:
        _step(compiled, rows)
    return int(re.search(r"a step takes ([\d,]+) at least", str(refused.value))[1].replace(",", ""))


def test_a_parameter_that_the_forward_does_not_read_counts_and_keeps_the_limit_on():
    read = _least(256, strict=True)
    assert _least(256, _Blocks(unused=50), strict=True) - read == 3 * 4 * 50 * 50, "its shard and Adam's two averages"


def test_smaller_batches_keep_the_limit_and_larger_ones_do_not_run_their_graph():
    limit = _least(512)
    model, compiled = _compiled(limit, strict=True)
    for rows in (512, 400, 512, 300):
        _step(compiled, rows)
        assert dsgraph.report(model).memory.peak <= limit
    assert len(dsgraph.report(model).compiles) == 2, "one of 512 rows, one of up to 400"
    _step(compiled, 500)
    assert len(dsgraph.report(model).compiles) == 3, "500 rows do not run what was planned for 400"
    with pytest.raises(Exception, match=r"memory_limit is .* and a step takes"):
        _step(compiled, 600)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return x.square().mean()


def _normed(limit: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, compiled = _compiled(limit, _Normed())
    compiled(torch.randn(8, 8, WIDTH)).backward()
    return [*(param.grad.full_tensor() for param in model.parameters()), *model.buffers()]


def test_what_reads_a_running_mean_is_not_repeated_with_the_new_one():
    torch.manual_seed(0)
    _, compiled = _compiled(1000, _Normed())
    with pytest.raises(Exception, match="a step takes") as refused:
        compiled(torch.randn(8, 8, WIDTH))
    least = int(re.search(r"a step takes ([\d,]+) at least", str(refused.value))[1].replace(",", ""))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(_normed(least), _normed(None), strict=True))


def test_sizes_up_to_a_maximum_are_named_as_not_planned_for():
    _, compiled = _compiled(10**9)
    x = torch.randn(64, WIDTH)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=512)
    with pytest.warns(UserWarning, match=r"cannot be promised for .* mark_dynamic\(max=...\)"):
        compiled(x)


def _compile_blocks(strict: bool) -> nn.Module:
    torch._dynamo.reset()
    model = dsgraph.partition(_Blocks(), stage=3)
    for block in model.blocks:
        block.compile(backend="dsgraph", options={"codegen": "eager", "memory_limit": 10**6, "strict": strict})
    return model


def test_blocks_compiled_one_by_one_are_named():
    model = _compile_blocks(strict=False)
    with pytest.warns(UserWarning, match=r"memory_limit cannot be promised for .*: _Block is compiled separately"):
        model(torch.randn(8, WIDTH))
    assert "memory_limit: 1.00 MB cannot be promised: _Block is compiled separately" in _text(model)
    with pytest.raises(Exception, match="_Block is compiled separately"):
        _compile_blocks(strict=True)(torch.randn(8, WIDTH))


def _text(model: nn.Module) -> str:
    return " ".join(str(dsgraph.report(model)).split())


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_torchs_own_budget_is_refused_by_name(budget):
    refuse_memory_budget()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        with pytest.raises(
            OptionError, match=rf"activation_memory_budget is {budget}, .* use the option 'memory_limit'"
        ):
            refuse_memory_budget()
        with pytest.raises(Exception, match="activation_memory_budget"):
            torch.compile(nn.Linear(4, 4), backend="dsgraph", options={"codegen": "eager"})(torch.randn(2, 4))

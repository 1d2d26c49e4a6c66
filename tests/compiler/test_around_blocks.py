"""Graphs around repeated blocks run uncompiled by default if they compute little."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.fx import symbolic_trace

import dsgraph
from dsgraph.compiler.around_blocks import options_of_graph
from dsgraph.compiler.frames import Capture, SourceLine
from dsgraph.compiler.options import BackendOptions

WIDTH = 96


def _codegen(module: nn.Module, *, rows: int = 64, around: bool = True, mode: str | None = None, **options: Any) -> str:
    capture = Capture(SourceLine("model.py", 1), is_around_blocks=around)
    given = BackendOptions(**options)
    return options_of_graph(given, symbolic_trace(module), [torch.ones(rows, WIDTH)], capture, mode=mode).codegen


def test_a_light_graph_around_blocks_runs_as_it_is_and_others_are_compiled():
    light, heavy = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    assert [_codegen(light), _codegen(heavy)] == ["eager", "inductor"]
    assert _codegen(light, around=False) == "inductor"
    assert _codegen(light, rows=2**16) == "inductor", "much data"


def test_settings_of_inductor_hold_for_all_graphs():
    light = nn.LayerNorm(WIDTH)
    assert _codegen(light, mode="max-autotune") == "inductor"
    assert _codegen(light, inductor={"max_autotune": True}) == "inductor"


def test_a_chosen_codegen_holds_for_all_graphs():
    assert [_codegen(nn.LayerNorm(WIDTH), codegen=chosen) for chosen in ("inductor", "eager")] == ["inductor", "eager"]


def test_a_graph_whose_size_is_not_known_is_compiled():
    class Depends(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (torch.nonzero(x),)

    assert _codegen(Depends()) == "inductor"


def test_a_graph_that_gathers_is_compiled_because_ranks_may_have_other_batches(one_rank):
    mesh = init_device_mesh("cpu", (1,))
    light, capture = symbolic_trace(nn.LayerNorm(WIDTH)), Capture(SourceLine("model.py", 1), is_around_blocks=True)
    sharded = [distribute_tensor(torch.ones(64, WIDTH), mesh, [Shard(0)])]
    assert options_of_graph(BackendOptions(), light, sharded, capture, mode=None).codegen == "inductor"
    plain = options_of_graph(BackendOptions(), light, [torch.ones(64, WIDTH)], capture, mode=None)
    assert plain.codegen == "eager"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class _Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(_Block() for _ in range(3)), _Norm()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@pytest.mark.inductor
def test_the_report_shows_which_graphs_were_compiled(fake_ranks):
    model = dsgraph.partition(_Model(), keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph")
    compiled(torch.ones(64, WIDTH))  # the first block has an input without a gradient
    assert [item.codegen for item in dsgraph.report(compiled).compiles] == ["inductor", "inductor", "eager"]
    torch._dynamo.reset()
    whole = torch.compile(model, backend="dsgraph", fullgraph=True)
    whole(torch.ones(2, WIDTH))  # which is little to compute
    assert [item.codegen for item in dsgraph.report(whole).compiles][-1] == "inductor"
    torch._dynamo.reset()
    apart = torch.compile(_Norm(), backend="dsgraph")
    apart(torch.ones(64, WIDTH))
    assert [item.codegen for item in dsgraph.report(apart).compiles] == ["inductor"]

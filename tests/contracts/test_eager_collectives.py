"""The number of collectives that a step starts outside graphs, whatever a script does with gradients.

Each is a launch of NCCL and Python on the host, while the device has nothing to do. A copy is suspect while its
parameter has a gradient (an optimizer may write through `.data`), so each forward gathers all copies once, in three
collectives. Uncompiled code reads copies one by one, and gathers those that are still suspect alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dsgraph
from tests.contracts.counting import Counting

PARAMETERS = 12
ALL = 3
"""Collectives that gather all copies."""


class _Collectives(Counting):
    """Counts collectives by name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func.__name__:
            self.count[func.__name__.partition(".")[0].removesuffix("_out")] += 1
        return func(*args, **(kwargs or {}))


# Compiled, zero_grad(set_to_none=...), backwards of a step -> the most gathers.
MOST: dict[tuple[bool, bool, int], int] = {
    (False, True, 1): ALL,
    (False, True, 2): ALL + PARAMETERS,
    (False, False, 1): ALL + PARAMETERS - 1,
    (False, False, 2): ALL + 2 * PARAMETERS - 1,
    (True, True, 1): ALL,
    (True, False, 2): 2 * ALL,
}


@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("compiled", "to_none", "backwards"), MOST)
def test_gathers_of_a_step_grow_with_the_parameters_alone(compiled, to_none, backwards, stage):
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(PARAMETERS)))
    model = dsgraph.partition(net, stage=stage, keep_whole_below=0)
    runs = torch.compile(model, backend="dsgraph", options={"codegen": "eager"}) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.ones(2, 8)

    def step() -> None:
        for _ in range(backwards):
            runs(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)

    for _ in range(3):
        step()
    with _Collectives() as found:
        step()
    assert 0 < found.count["allgather_into_tensor_coalesced_"] <= MOST[compiled, to_none, backwards], found.count
    assert sum(count for name, count in found.count.items() if "reduce" in name) <= backwards * PARAMETERS, found.count


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class _Blocks(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.usefixtures("fake_ranks")
def test_a_block_is_gathered_and_reduced_as_a_whole():
    model = dsgraph.partition(_Blocks(3), stage=3, keep_whole_below=0)
    runs = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    for _ in range(2):
        runs(torch.ones(2, 8)).backward()
        model.zero_grad()
    with _Collectives() as found:
        runs(torch.ones(2, 8)).backward()
    assert 0 < found.count["reduce_scatter_tensor_coalesced"] <= 3, found.count
    assert not any("reduce" in name and "coalesced" not in name for name in found.count), found.count


@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize(("limit", "first", "later"), [(None, 5, 5), ("1GB", 3, 1)])
def test_spare_memory_holds_the_parameters_of_blocks_for_all_micro_batches(limit, first, later):
    model = dsgraph.partition(_Blocks(3), stage=3, keep_whole_below=0)
    runs = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "memory_limit": limit})
    optimizer = torch.optim.SGD(model.parameters())

    def gathers(collectives: _Collectives) -> int:
        return collectives.count["allgather_into_tensor_coalesced_"]

    for _ in range(2):
        with dsgraph.accumulate(model), _Collectives() as begins:
            runs(torch.ones(2, 8)).backward()
        with dsgraph.accumulate(model), _Collectives() as goes_on:
            runs(torch.ones(2, 8)).backward()
        with _Collectives() as ends:
            runs(torch.ones(2, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    each = gathers(begins) // first
    assert (gathers(begins), gathers(goes_on), gathers(ends)) == (first * each, later * each, later * each)

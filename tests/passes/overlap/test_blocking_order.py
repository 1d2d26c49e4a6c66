"""All groups of all axes of a mesh have one order of collectives: ranks that block at each of them come to the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import dsgraph
from dsgraph.passes import PassContext, PassResult, Pipeline
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from tests.passes import blocking
from tests.passes.blocking import DeadlockError, Step

WIDTH = 24


class Small(nn.Module):
    """A weight that is used twice, rows that do not divide, small parameters, and matrices of equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.linear(self.norm(x), self.embedding.weight).square().mean()


@dataclass(frozen=True)
class OnGloo(ChooseCollectiveAlgorithms):
    """The effect of the pass if the mesh uses gloo: the groups of these tests have no backend."""

    @property
    def name(self) -> str:
        return "choose_collective_algorithms"

    def run(self, gm, ctx: PassContext) -> PassResult:
        return super().run(gm, replace(ctx, axes=tuple(replace(axis, backend="gloo") for axis in ctx.axes)))


@dataclass(frozen=True)
class Program:
    """The program of one rank: its collectives, forward then backward, and the names of all nodes in order."""

    steps: tuple[Step, ...]
    nodes: tuple[str, ...]


@cache
def program(rank: int, shape: tuple[int, int], *, stage: int, batch: int = 2, on_gloo: bool = False) -> Program:
    """Return the model's program for one rank after the default pipeline; the other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape[0] * shape[1])
    try:
        torch._dynamo.reset()
        # With the rank in their names: torch keeps meshes, and hands them out for equal ones, whatever the rank.
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=(f"replicate{rank}", f"shard{rank}"))
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        members = {group.group_name: dist.get_process_group_ranks(group) for group in groups}
        found: list[Step] = []
        nodes: list[str] = []

        @dsgraph.graph_pass(phase="forward")
        def keep_forward(gm, ctx):
            axes = tuple(replace(axis, name=axis.name.removesuffix(str(rank))) for axis in ctx.axes)
            found.extend(blocking.steps(gm, replace(ctx, axes=axes), members=members))
            nodes.extend(node.name for node in gm.graph.nodes)
            return 0

        @dsgraph.graph_pass(phase="backward")
        def keep_backward(gm, ctx):
            return keep_forward.run(gm, ctx)

        passes = dsgraph.default_pipeline()
        if on_gloo:
            passes = Pipeline(OnGloo() if isinstance(item, ChooseCollectiveAlgorithms) else item for item in passes)
        torch.manual_seed(0)
        model = dsgraph.partition(Small(), mesh, stage=stage, keep_whole_below=100)
        options = {"codegen": "eager", "pipeline": passes + [keep_forward, keep_backward]}
        torch.compile(model, backend="dsgraph", options=options)(torch.zeros(batch, 3, dtype=torch.int64)).backward()
        return Program(tuple(found), tuple(nodes))
    finally:
        dist.destroy_process_group()


def programs(shape: tuple[int, int], **how) -> dict[int, tuple[Step, ...]]:
    return {rank: program(rank, shape, **how).steps for rank in range(shape[0] * shape[1])}


def orders(found: Mapping[int, Sequence[Step]]) -> set[tuple[str, ...]]:
    return {tuple(step.what for step in steps) for steps in found.values()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "on_gloo", "stage"),
    [
        ((2, 2), True, 2),
        pytest.param((2, 2), False, 3, marks=pytest.mark.full),  # with other batches below
        *[
            pytest.param(*member, marks=pytest.mark.full)
            for on_gloo, shape in ((False, (2, 2)), (True, (2, 4)))
            for member in ((shape, on_gloo, stage) for stage in range(4))
            if member != ((2, 2), False, 3)
        ],
    ],
)
def test_blocking_ranks_come_to_the_end(shape, on_gloo, stage):
    found = programs(shape, stage=stage, on_gloo=on_gloo)
    assert len(orders(found)) == 1
    groups = {step.members for steps in found.values() for step in steps}
    assert len(groups) == shape[0] + shape[1]
    assert blocking.run(found) == sum(len(blocking.only(found, {group})[min(group)]) for group in groups)
    for pair in combinations(groups, 2):
        blocking.run(blocking.only(found, pair))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_ranks_with_other_batches_have_the_same_order(stage):
    batches = (2, 4096, 512, 32768)  # of which computing takes less, and more, than a transfer
    of_rank = [program(rank, (2, 2), stage=stage, batch=batch) for rank, batch in enumerate(batches)]
    assert len({one.nodes for one in of_rank}) > 1  # the graphs do differ
    found = {rank: one.steps for rank, one in enumerate(of_rank)}
    assert len(orders(found)) == 1
    blocking.run(found)


@pytest.fixture(scope="module")
def good():
    """The programs of the ranks of a 2x2 mesh in stage 3: gathers, then reductions alternating between the axes."""
    return {rank: list(steps) for rank, steps in programs((2, 2), stage=3).items()}


def _swapped(good: Mapping[int, list[Step]], first: int, second: int) -> dict[int, list[Step]]:
    """The programs with two collectives of rank 0 in each other's place."""
    steps = list(good[0])
    steps[first], steps[second] = steps[second], steps[first]
    return {**good, 0: steps}


@pytest.mark.slow
def test_two_collectives_swapped_on_one_rank_are_a_deadlock(good):
    names = [step.name for step in good[0]]
    bad = _swapped(good, names.index("reduce_scatter_tensor_default"), names.index("all_reduce_default_1"))
    for run in (bad, blocking.only(bad, {frozenset({0, 1}), frozenset({0, 2})})):
        with pytest.raises(DeadlockError) as error:
            blocking.run(run)
        for part in (
            "rank 0 stands at all_reduce_default_1 of ranks [0, 2] for rank 2 at all_reduce_default;",
            "rank 1 stands at reduce_scatter_tensor_default of ranks [0, 1] for rank 0 at all_reduce_default_1;",
        ):
            assert part in str(error.value)


@pytest.mark.slow
def test_groups_that_keep_their_own_orders_deadlock_all_the_same(good):
    bad = {**good, 0: sorted(good[0], key=lambda step: step.members != {0, 2})}
    for group in {step.members for step in good[0]}:
        blocking.run(blocking.only(bad, {group}))
    with pytest.raises(DeadlockError, match=r"rank 0 stands at all_reduce_default_1 of ranks \[0, 2\] for rank 2 at"):
        blocking.run(bad)


@pytest.mark.slow
def test_every_swap_is_another_order_for_the_ranks_to_compare(good):
    count = len(good[0])
    assert all(len(orders(_swapped(good, *pair))) == 2 for pair in combinations(range(count), 2))


@pytest.mark.slow
def test_a_rank_that_ends_early_is_named(good):
    with pytest.raises(DeadlockError, match=r"rank 1 stands at .* for rank 0 at its end"):
        blocking.run({**good, 0: good[0][:-2]})

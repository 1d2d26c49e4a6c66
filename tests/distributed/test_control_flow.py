"""`torch.cond`, `scan`, `map` and `while_loop` over layers, and selective checkpoints, of a partitioned model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dsgraph
from tests.distributed.training import full

pytestmark = pytest.mark.distributed


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(6, 6), nn.Linear(6, 6)


class Branches(Layers):
    """One layer in both branches, one branch inside another."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return torch.cond(y.sum() > 100, lambda z: self.near(z).tanh(), lambda z: self.far(z), (y,))

        return torch.cond(x.mean() > 0, lambda y: self.near(y).relu(), lambda y: inner(y) + self.near(y), (x,))


class Scan(Layers):
    def forward(self, x: Tensor) -> Tensor:
        def step(carry: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
            following = (self.near(item) + self.far(carry)).tanh()
            return following, following.clone()

        return scan(step, x[0].clone(), x, dim=0)[1]


def _batch(number: int, rank: int) -> Tensor:
    """Ranks take different branches: the mean is above zero on the first one alone."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
    return x - x.mean() + (0.5 if rank == 0 else -0.5)


def _same_as_one_process(make: Callable[[], nn.Module], stage: int, codegen: str | None, accumulates: bool) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = make()
    model = dsgraph.partition(copy.deepcopy(plain), stage=stage, keep_whole_below=0)
    runs: Any = model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        if accumulates:
            with dsgraph.accumulate(model):
                runs(_batch(2 * step, rank)).square().mean().backward()
        runs(_batch(2 * step + 1, rank)).square().mean().backward()
        for number in range(0 if accumulates else 1, 2):
            for other in range(2):
                (plain(_batch(2 * step + number, other)).square().mean() / 2).backward()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(mine.grad), theirs.grad, rtol=1e-4, atol=1e-6, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make", "stage", "codegen", "accumulates"),
    [
        (Branches, 3, "eager", False),
        pytest.param(Branches, 1, None, False, marks=pytest.mark.full),
        pytest.param(Branches, 1, "eager", True, marks=pytest.mark.full),
        pytest.param(Branches, 0, "eager", True, marks=pytest.mark.full),
        pytest.param(Branches, 3, None, False, marks=pytest.mark.full),
        pytest.param(Scan, 1, None, False, marks=pytest.mark.full),
        pytest.param(
            *(Scan, 3, "eager", False),
            marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="torch refuses a body that returns its input"),
        ),
    ],
)
def test_ranks_that_take_different_branches_train_as_one_process(ranks, make, stage, codegen, accumulates):
    ranks(2).run(_same_as_one_process, make, stage, codegen, accumulates)


def _infers() -> None:
    plain = Branches()
    expected = plain(_batch(0, 0))
    compiled = torch.compile(dsgraph.partition(plain, stage=3, keep_whole_below=0), backend="dsgraph")
    with torch.no_grad():
        torch.testing.assert_close(compiled(_batch(0, 0)), expected)


@pytest.mark.inductor
def test_fused_kernels_of_branches_infer(ranks):
    ranks(1).run(_infers)


def _stale_in_a_branch() -> None:
    model = dsgraph.partition(Branches(), stage=1, keep_whole_below=0)
    with dsgraph.accumulate(model), pytest.raises(Exception, match="parameter 'weight' is read inside dsgraph"):
        model(_batch(0, dist.get_rank()))


def test_an_uncompiled_branch_inside_accumulate_is_refused(ranks):
    ranks(2).run(_stale_in_a_branch)


def _saves_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """Blocks with parameters of their own: which of them wait for gathers depends on what ran before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layers() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _saves_products)

        def run(block: Layers, y: Tensor) -> Tensor:
            return y + block.far(F.gelu(block.near(y)))

        for block in self.blocks:
            x = checkpoint(run, block, x, use_reentrant=False, context_fn=contexts)
        return x


@pytest.mark.parametrize(
    ("stage", "accumulates"), [(1, False), (1, True), pytest.param(2, True, marks=pytest.mark.full)]
)
def test_a_selective_checkpoint_recomputes_what_the_forward_ran(ranks, stage, accumulates):
    ranks(2).run(_same_as_one_process, Checkpointed, stage, None, accumulates)

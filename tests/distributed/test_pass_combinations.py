"""Each default pass alone, left out, and with each other one: all compute what one process computes, bit for bit alike.

`make test` runs few combinations, in which each two passes are met with both, with the one, the other, and none.
A pass that is new in the defaults is tried by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dsgraph
from dsgraph.passes import Pipeline
from dsgraph.passes.core.graph_pass import GraphPass
from tests.covering import subsets
from tests.distributed.training import ATOL, RTOL, full
from tests.models import features

pytestmark = pytest.mark.distributed

# Lowers the markers: without it there is nothing to pass over.
NEEDED = "insert_zero_collectives"

# Passes that have nothing to do without another one.
FOLLOWERS = {"release_kept_gather": "keep_last_gather"}

# Enough to keep every parameter for the backward, which leaves passes over the backward's gathers nothing to do.
MEMORY = 10**9
KEEPING = "selective_gather"

# Passes that add up in another order: one gradient of a weight that is used twice is reduced, in place of two. All
# others change places, memory and bytes, and no bit of a result.
REASSOCIATING = {"merge_gathers"}


class Varied(nn.Module):
    """Something to do for every pass: a weight used twice, one in a lower precision, neighbours, small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(7, 16, bias=False), nn.LayerNorm(16)
        self.once, self.twice = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.low = nn.Linear(16, 5, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.twice(torch.tanh(self.twice(self.once(self.norm(self.first(x))))))
        return F.mse_loss(F.linear(h.bfloat16(), self.low.weight.bfloat16()).float(), y)


def _units() -> list[frozenset[str]]:
    """Return the units that are switched on and off: names of passes, each with those that follow it."""
    names = [item.name for item in dsgraph.default_pipeline() if item.name != NEEDED]
    alone = [name for name in names if name not in FOLLOWERS]
    return [frozenset({name, *(other for other in names if FOLLOWERS.get(other) == name)}) for name in alone]


def _combinations(units: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """None, each alone, each pair, and each left out."""
    counts = dict.fromkeys((0, 1, 2, len(units) - 1))  # as many at a time
    return [frozenset().union(*some) for count in counts for some in combinations(units, count)]


def _pipeline(names: Iterable[str]) -> Pipeline:
    """The default passes of these names, those that provide what they require, and what is needed."""
    default = dsgraph.default_pipeline()
    chosen: set[GraphPass] = set()
    frontier = [item for item in default if item.name in {NEEDED, *names}]
    while frontier:
        item = frontier.pop()
        chosen.add(item)
        frontier += [other for other in default if other.provides & item.requires and other not in chosen]
    return Pipeline(item for item in default if item in chosen)


def _alone(world: int) -> list[Tensor]:
    """The loss on this rank's batch, and the gradients of all ranks' batches, averaged, in one process."""
    losses, gradients = [], []
    for rank in range(world):
        torch.manual_seed(0)
        model = Varied()
        losses.append(model(*features(0, rank)))
        gradients.append(torch.autograd.grad(losses[rank], list(model.parameters())))
    return [losses[dist.get_rank()].detach(), *(sum(each) / world for each in zip(*gradients, strict=True))]


def _train(model: nn.Module, pipeline: Pipeline) -> list[Tensor]:
    torch._dynamo.reset()
    model.zero_grad()
    options = {"codegen": "eager", "pipeline": pipeline, "memory_limit": MEMORY}
    compiled = torch.compile(model, backend="dsgraph", options=options)
    loss = compiled(*features(0, dist.get_rank()))
    loss.backward()
    return [loss.detach(), *(full(parameter.grad) for parameter in model.parameters())]


def _few_combinations(units: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """So few that of each two units there are both, the one, the other, and none; and all."""
    return [frozenset().union(*some) for some in [*subsets(units), units]]


def _compare_all(stage: int, combine: Callable[[Sequence[frozenset[str]]], list[frozenset[str]]]) -> set[str]:
    """Compares combinations of the passes that have something to do; returns their names."""
    torch.manual_seed(0)
    model = dsgraph.partition(Varied(), stage=stage, keep_whole_below=20)
    names = ["loss", *(name for name, _ in model.named_parameters())]
    alone = _alone(dist.get_world_size())
    every = frozenset().union(*_units())
    first: dict[frozenset[str], list[Tensor]] = {}
    for chosen in (every, every - {KEEPING}):
        first.setdefault(every & REASSOCIATING, _train(model, _pipeline(chosen)))
    changed = {item.name for made in dsgraph.report(model).compiles for item in made.passes if item.changed}
    for chosen in combine([unit for unit in _units() if unit & changed]):
        found = _train(model, _pipeline(chosen))
        expected = first.setdefault(chosen & REASSOCIATING, found)
        for name, ours, alike in zip(names, found, expected, strict=True):
            assert torch.equal(ours, alike), f"passes {sorted(chosen)} change a bit of {name}"
    for found in first.values():
        torch.testing.assert_close(found, alone, rtol=RTOL, atol=ATOL)
    return changed


@pytest.mark.parametrize("combine", [_few_combinations, pytest.param(_combinations, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_every_combination_computes_what_one_process_computes(ranks, stage, combine):
    changed = ranks(2).run(_compare_all, stage, combine)[0]
    # On a CPU no kernel of these models gains anything, so that none is substituted; nothing of them is sliced, no
    # optimizer has its momentum reduced, and no weight is rounded.
    without_cause = {"substitute_kernels", "compress_reductions", "lower_fake_weights"}
    without_cause |= {"slice_tensors", "lower_forward_slices", "lower_backward_slices"}
    idle = {item.name for item in dsgraph.default_pipeline()} - changed - without_cause
    if stage == 2:
        assert all("gather" in name for name in idle), f"{sorted(idle)} had nothing to do"
    else:
        assert idle == {"await_copies"}, f"{sorted(idle)} had nothing to do"

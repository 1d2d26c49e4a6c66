"""Each optimizer of torch steps as in one process, or is refused by name; and so is DistributedDataParallel."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks as step_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

import dsgraph
from dsgraph.partitioning.guards import refuse_optimizer
from dsgraph.partitioning.state import partition_states
from dsgraph.utils.errors import PartitionError
from tests.distributed.training import full

WAYS = ((), ("foreach",), ("fused",))
OPTIMIZERS = sorted(
    name
    for name, kind in vars(optim).items()
    # SparseAdam takes sparse gradients alone, and says so.
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
)
NEED_ALL_ROWS = ("Adafactor", "Muon", "Rprop")


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))


def _optimizer(name: str, model: nn.Module, way: tuple[str, ...]) -> optim.Optimizer:
    params = [param for param in model.parameters() if param.dim() == 2 or name != "Muon"]
    return getattr(optim, name)(params, lr=0.05, **dict.fromkeys(way, True))


def _takes(name: str, way: tuple[str, ...]) -> bool:
    return all(option in inspect.signature(getattr(optim, name)).parameters for option in way)


def _is_refused(name: str, way: tuple[str, ...], stage: int) -> bool:
    if name in NEED_ALL_ROWS and stage > 0:
        return True
    if (name, *way) == ("Adafactor", "foreach"):
        return torch.__version__ < "2.13"
    return (name, *way) in [("SGD", "fused"), ("Adagrad", "fused"), ("Rprop", "foreach")]


def _step(name: str, optimizer: optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    """Steps with a closure where there must be one: it is called as often as the optimizer likes."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return _mean_over_ranks(value) if value.requires_grad and loss.__name__ == "ours" else value

    if name == "LBFGS":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def _mean_over_ranks(value: Tensor) -> Tensor:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _compare(name: str, way: tuple[str, ...], stage: int, keep_whole_below: int) -> None:
    """Three steps against one process; or what a refusal says, of a step that has changed nothing."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = _build()
    model = dsgraph.partition(_build(), stage=stage, keep_whole_below=keep_whole_below)
    own, alones = _optimizer(name, model, way), _optimizer(name, alone, way)
    for step in range(3):
        batches = [torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)]

        def ours(batch: Tensor = batches[rank]) -> Tensor:
            return model(batch).square().mean()

        def theirs(batches: list[Tensor] = batches) -> Tensor:
            return sum(alone(batch).square().mean() for batch in batches) / world

        if _is_refused(name, way, stage):
            with pytest.raises(PartitionError, match=f"{name}: .*'0.weight'.*nothing was updated"):
                _step(name, own, ours)
        else:
            _step(name, own, ours)
            _step(name, alones, theirs)
        for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(mine), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.covering(1)
@pytest.mark.parametrize("keep_whole_below", (0, 20))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize(("name", "way"), [(name, way) for name in OPTIMIZERS for way in WAYS if _takes(name, way)])
def test_each_optimizer_steps_as_in_one_process_or_is_refused(ranks, name, way, stage, keep_whole_below):
    ranks(2).run(_compare, name, way, stage, keep_whole_below)


def _flatten_uneven_rows() -> None:
    model = dsgraph.partition(nn.Linear(3, 5), stage=3, keep_whole_below=0)
    optimizer = optim.LBFGS(model.parameters())
    with pytest.raises(PartitionError, match=r"LBFGS: .*'weight', whose 5 rows do not divide"):
        optimizer.step(lambda: 0.0)
    refuse_optimizer(optim.LBFGS(model.parameters()), partition_states(dsgraph.partition(nn.Linear(3, 4)))[0])


@pytest.mark.distributed
def test_lbfgs_takes_rows_that_divide(ranks):
    ranks(2).run(_flatten_uneven_rows)


def _stepping(model: nn.Module) -> Any:
    model(torch.ones(2, 3)).sum().backward()
    return optim.SGD(model.parameters(), fused=True).step


def test_only_optimizers_of_living_partitioned_models_are_refused(one_rank):
    gc.collect()
    first = dsgraph.partition(nn.Linear(3, 4))  # removes the hooks of models of other tests
    before = len(step_hooks)
    model = dsgraph.partition(nn.Linear(3, 4), stage=1, keep_whole_below=0)
    _stepping(nn.Linear(3, 4))()
    twin = copy.deepcopy(partition_states(model)[0])
    with pytest.raises(PartitionError, match="leave fused=True out"):
        _stepping(model)()
    assert len(step_hooks) > before
    del model, twin
    gc.collect()
    _stepping(nn.Linear(3, 4))()
    living = dsgraph.partition(nn.Linear(3, 4))
    assert len(step_hooks) == before + 1, "the next partition removes the hooks of models that are gone"
    del first, living


class Normed(nn.Sequential):
    """With buffers, which DistributedDataParallel sends together with parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_a_model_is_collected_during_the_step_of_another(one_rank):
    optimizer = optim.SGD(_build().parameters())
    held: list[nn.Module] = []

    def collect(*_: object) -> None:
        held.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    held.append(dsgraph.partition(_build()))
    optimizer.step()  # torch iterates over the hooks, and the model's come next
    handle.remove()
    assert not held


@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize("wrap", (lambda m: m, nn.Sequential, lambda m: torch.compile(m, backend="dsgraph")))
@pytest.mark.parametrize("options", ({}, {"init_sync": False}))
def test_ddp_is_told_that_gradients_are_averaged_already(one_rank, stage, wrap, options):
    model = wrap(dsgraph.partition(Normed(), stage=stage, keep_whole_below=0))
    with pytest.raises(PartitionError, match=r"averaged over the ranks already.*docs/guides/frameworks\.md"):
        DistributedDataParallel(model, **options)


def test_ddp_takes_other_models(one_rank):
    model = dsgraph.partition(Normed(), stage=3)
    DistributedDataParallel(Normed())
    nn.Sequential(model)

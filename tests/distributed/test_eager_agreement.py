"""Ranks that part ways in eager code raise together, within seconds, and name parameter and ranks."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Shard

import dsgraph

pytestmark = pytest.mark.distributed


class Branches(nn.Module):
    """Two layers, of which a forward uses the first, the second, or both."""

    def __init__(self, widths: tuple[int, int] = (4, 4)) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(4, width, bias=False) for width in widths)

    def forward(self, x: Any, which: str = "ab") -> Any:
        torch._dynamo.graph_break()
        return sum(self._run(layer, x).sum() for layer in which)

    @torch._dynamo.disable
    def _run(self, layer: str, x: Any) -> Any:
        return getattr(self, layer)(x)


def _said(function: Callable[..., object], *args: Any) -> str:
    started = time.perf_counter()
    with pytest.raises(dsgraph.RanksDisagreeError) as caught:
        function(*args)
    assert time.perf_counter() - started < 8, "with a time-out of 60 s"
    return str(caught.value)


def _partition(stage: int, widths: tuple[int, int] = (4, 4)) -> Any:
    torch.manual_seed(0)
    return dsgraph.partition(Branches(widths), stage=stage, keep_whole_below=0)


def _take_different_paths(widths: tuple[int, int], compiled: bool) -> str:
    model = _partition(3, widths)
    run: Any = torch.compile(model, backend="dsgraph", options={"codegen": "eager"}) if compiled else model
    return _said(run, torch.ones(2, 4), "ab"[dist.get_rank()])


@pytest.mark.parametrize("compiled", (False, True), ids=("uncompiled", "after a graph break"))
@pytest.mark.parametrize("widths", ((4, 4), (4, 400)), ids=("alike", "unlike"))
def test_ranks_that_gather_different_parameters_are_told(ranks, widths, compiled):
    for said in ranks(2).run(_take_different_paths, widths, compiled):
        assert "rank 0 gathers parameter 'a.weight', rank 1 gathers parameter 'b.weight'" in said
        assert "same parts of the model" in said


def _reduce_different_gradients(stage: int) -> str:
    model = _partition(stage, (4, 8))
    losses = [model.a(torch.ones(1, 4)).sum(), model.b(torch.ones(1, 4)).sum()]
    return _said(losses[dist.get_rank()].backward)


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_ranks_that_reduce_different_gradients_are_told(ranks, stage):
    for said in ranks(2).run(_reduce_different_gradients, stage):
        assert "rank 0 reduces the gradient of 'a.weight', rank 1 reduces the gradient of 'b.weight'" in said


def _read_on_one_rank(stage: int, then: str) -> str | None:
    model = _partition(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        return _said(lambda: model.b.weight.norm())
    return _said(model, torch.ones(1, 4)) if then == "forward" else None


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("then", ("forward", "nothing"))
def test_a_read_on_one_rank_is_told_in_seconds_and_how_to_do_it(ranks, stage, then):
    first, other = ranks(2).run(_with_patience, "2", _read_on_one_rank, stage, then)
    assert "rank 0 gathers" in first and "outside a forward" in first
    assert "read it on all ranks" in first and "dict(model.named_parameters())[name]" in first
    if then == "forward":
        assert other == first
    else:
        assert "ranks [1] did not reach it within 2 s" in first and "DSGRAPH_EAGER_PATIENCE" in first


def _calls_of_torch(folder: Path, stage: int) -> tuple[dict[str, Callable[[], Any]], Callable[..., Any]]:
    model = _partition(stage)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).backward()
    optimizer.step()
    own = dict(model.named_parameters())["a.weight"]
    calls = {
        "parameter": own.full_tensor,
        "gradient": own.grad.full_tensor,
        "state": optimizer.state[own]["exp_avg"].full_tensor,
        "result": (own.detach() * 2).full_tensor,
        "columns": lambda: own.detach().redistribute(placements=[Shard(1)]),
        "torch.save": lambda: torch.save(own.detach(), folder / f"{dist.get_rank()}.pt"),
        "dcp.save": lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp"),
        "dcp.load": lambda: dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "dcp"),
    }
    return calls, model


def _call_torch_on_one_rank(folder: Path, stage: int, names: tuple[str, ...]) -> dict[str, str]:
    calls, model = _calls_of_torch(folder, stage)
    said = {name: _said(calls[name]) for name in names} if dist.get_rank() == 0 else {}
    dist.barrier()
    for name in names:
        calls[name]()
    model(torch.ones(1, 4)).backward()
    return said


_CALLS = ("parameter", "gradient", "state", "result", "columns", "torch.save", "dcp.save", "dcp.load")


@pytest.mark.parametrize("names", (("parameter", "dcp.save"), pytest.param(_CALLS, marks=pytest.mark.full)))
def test_what_torch_does_on_shards_on_one_rank_is_told(ranks, tmp_path, names):
    said, _ = ranks(2).run(_with_patience, "1", _call_torch_on_one_rank, tmp_path, 3, names)
    for name, text in said.items():
        verb = "pickles its rows" if name == "torch.save" else "gathers the shards of a tensor [4, 4]"
        assert f"rank 0 calls torch.distributed.checkpoint.{name[4:]}" in text if "dcp" in name else verb in text
        assert "ranks [1] did not reach it within 1 s" in text
    assert "All ranks must save and load checkpoints" in said["dcp.save"]


def _call_torch_alone(folder: Path) -> None:
    calls, _ = _calls_of_torch(folder, 0)
    for name in _CALLS[:6] if dist.get_rank() == 0 else ():
        calls[name]()
    if dist.get_rank() == 0:
        dcp.save({"step": torch.ones(1)}, checkpoint_id=folder / "alone", no_dist=True)


@pytest.mark.full
def test_what_is_replicated_needs_no_other_rank(ranks, tmp_path):
    ranks(2).run(_call_torch_alone, tmp_path)


def _with_patience(seconds: str, function: Callable[..., Any], *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSGRAPH_EAGER_PATIENCE", seconds)
        return function(*args)


def _go_on_after_errors() -> list[bool]:
    model, rank = _partition(3), dist.get_rank()
    if rank == 0:  # taken back when nobody has come
        _said(lambda: model.a.weight)
    dist.barrier()
    equal = [torch.equal(model.b.weight, model.b.weight)]
    if rank == 1:
        _said(lambda: model.a.weight)
    dist.barrier()
    _said(model, torch.ones(1, 4), "ab"[rank])
    model(torch.ones(1, 4)).backward()
    again = copy.deepcopy(model)
    return [*equal, torch.equal(again(torch.ones(1, 4)), model(torch.ones(1, 4)))]


def test_ranks_stay_in_step_after_an_error(ranks):
    assert ranks(2).run(_with_patience, "1", _go_on_after_errors) == [[True, True]] * 2


def _leave_the_known_way(rank_that_leaves: int) -> None:
    model, x = _partition(3, (4, 400)), torch.ones(1, 4)
    for _ in range(3):
        model(x, "ab")
    if dist.get_rank() == rank_that_leaves:
        raise AssertionError(_said(model, x, "b"))
    model(x, "ab")


@pytest.mark.parametrize("leaves", (0, 1))
def test_a_rank_that_leaves_what_was_known_to_follow_raises_at_once(ranks, leaves):
    with pytest.raises(AssertionError) as caught:
        ranks(2).run(_leave_the_known_way, leaves, timeout_s=3)
    a, b = ("b", "a") if leaves == 0 else ("a", "b")
    planned = "the parameters of plan 1, 'a.weight' first"  # by the rank that does what it did before
    a, b = (planned if name == "a" else f"parameter '{name}.weight'" for name in (a, b))
    parted = f"rank 0 gathers {a}, rank 1 gathers {b}: they diverge here"
    first, second = re.split(r"\nrank [01]: (?=Traceback)", str(caught.value))
    assert parted in first and parted in second, "the rank that was in the collective says the same"


def _three_ranks() -> str:
    return _said(_partition(3), torch.ones(2, 4), "aab"[dist.get_rank()])


@pytest.mark.covering
@pytest.mark.parametrize("world", (3,))
def test_all_ranks_of_three_are_told(ranks, world):
    for said in ranks(world).run(_three_ranks):
        assert "gathers parameter 'a.weight', rank 2 gathers parameter 'b.weight'" in said


def _wait_in_a_forward() -> str | None:
    model = _partition(3)
    if dist.get_rank() == 1:
        time.sleep(4)
        return None
    return _said(model, torch.ones(1, 4))


def test_who_waits_in_a_forward_says_for_what_after_the_groups_timeout(ranks):
    said, _ = ranks(2).run(_wait_in_a_forward, timeout_s=3)
    assert "rank 0 gathers parameter 'a.weight', and ranks [1] did not reach it within 3 s" in said


def _compare_nothing() -> bool:
    model = _partition(3)
    model(torch.ones(1, 4)).backward()
    return not any("eager" in key for key in dist.distributed_c10d._get_default_store().list_keys())


def test_it_can_be_turned_off(ranks):
    assert all(ranks(2).run(_with_patience, "0", _compare_nothing))


def _refuse_patience() -> str:
    with pytest.raises(dsgraph.PartitionError) as caught:
        _partition(0)
    return str(caught.value)


@pytest.mark.parametrize("text", ("soon", "-1", "inf"))
def test_a_patience_that_is_none_is_refused_when_the_model_is_partitioned(ranks, text):
    assert ranks(1).run(_with_patience, text, _refuse_patience) == [
        f"DSGRAPH_EAGER_PATIENCE is {text!r}; expected a number of seconds, or 0 to compare nothing"
    ]

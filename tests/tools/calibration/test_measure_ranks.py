"""Measurements agree with known costs, and with each other."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from dsgraph.compiler.costs.calibration_record import LinkRecord
from dsgraph.compiler.costs.host import device_name, host_name
from dsgraph.inductor_ext import c10d_functional
from dsgraph.passes.analysis.cost import sent_bytes
from dsgraph.passes.ir.collectives import TABLE, Collective, Role, collective_kind, collectives
from dsgraph.tools.calibration import measure_collectives as calibration
from dsgraph.tools.calibration.measure_collectives import KINDS, SIZES, measure_collectives
from dsgraph.tools.calibration.measure_ranks import _rank_groups, measure_ranks
from tests.passes.tracing import trace


def test_groups_are_all_ranks_and_those_of_each_host():
    assert _rank_groups(["a"]) == []
    assert _rank_groups(["a", "a", "a"]) == [[[0, 1, 2]]]
    assert _rank_groups(["a", "b"]) == [[[0, 1]]]
    assert _rank_groups(["a", "a", "b", "b"]) == [[[0, 1, 2, 3]], [[0, 1], [2, 3]]]
    assert _rank_groups(["a", "b", "a", "b"]) == [[[0, 1, 2, 3]], [[0, 2], [1, 3]]]
    assert _rank_groups(["a", "a", "b"]) == [[[0, 1, 2]]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@pytest.mark.parametrize("ranks", (2, 3))
def test_bytes_sent_and_kinds_are_those_of_the_cost_model(kind, ranks):
    part, whole = torch.ones(8), torch.ones(8 * ranks)
    gm = trace(lambda p, w: c10d_functional.wait_tensor(calibration.start(kind, p, w, ranks, "0")), part, whole)
    (started,) = collectives(gm)
    assert collective_kind(started) == kind.kind
    assert sent_bytes(started, ranks) == calibration.sent_bytes(kind, part, whole, ranks)
    rounds = 2 if kind.kind == "all_reduce" else 1
    assert sent_bytes(started, ranks) == rounds * part.nbytes * (ranks - 1)


def _measure(seconds: float) -> tuple[list[Any], float]:
    started = time.perf_counter()
    records = measure_ranks(seconds=seconds)
    return records, time.perf_counter() - started


@pytest.mark.full  # test_agreed.py has ranks that agree, and a known link is measured below
@pytest.mark.distributed
def test_two_ranks_have_one_calibration_between_them(ranks):
    (first, took), (other, _) = ranks(2).run(_measure, 0.5)
    assert first == other
    assert took < 40
    (record,) = [item for item in first if item.device_type == "cpu"]
    assert (record.host, record.device, record.threads) == (host_name(), device_name("cpu"), 1)
    assert 1e8 < record.flops_per_s["float32"] < 1e13
    assert 1e8 < record.bytes_per_s < 1e13
    assert 1e-8 < record.kernel_s < 1e-3
    assert {(link.kind, link.group) for link in record.links} == {(kind.kind, ("gloo", 2, 1)) for kind in KINDS}
    assert record.links[0].delay > 0 or (os.cpu_count() or 1) > 4, "ranks of as many cores are delayed"
    for link in record.links:
        assert 4 <= len(link.samples) <= len(SIZES)
        assert 1e-6 < link.latency_s + link.samples[0][0] / link.bytes_per_s < 1e-1
        assert 1e6 < link.bytes_per_s < 1e12
        assert 0 <= link.delay < 5


_SLOW = 0.02  # seconds


def _start_late(whole: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    if dist.get_rank() == 1:
        time.sleep(_SLOW + whole.nbytes / 2e6)
    return c10d_functional.all_reduce(whole, "sum", group)


def _measure_slow() -> dict[str, Any]:
    group = dist.new_group()
    slow = Collective(c10d_functional.broadcast.default, Role.ALL_REDUCE, shares=lambda n: n - 1, start=_start_late)
    kinds = (slow, TABLE.by_kind["all_reduce"])
    started = time.perf_counter()
    found = measure_collectives(group, device_type="cpu", seconds=4.0, kinds=kinds)
    return {"found": found, "took": time.perf_counter() - started}


@pytest.mark.distributed
def test_a_known_latency_and_bandwidth_are_found_in_the_time_given(ranks):
    for rank in ranks(2).run(_measure_slow):
        slow, plain = rank["found"]
        assert slow.latency_s == pytest.approx(_SLOW, rel=0.5)
        assert slow.bytes_per_s == pytest.approx(1e6, rel=0.3)  # of each 2 bytes one is sent
        assert plain.latency_s < _SLOW / 2
        assert len(slow.samples) == len(plain.samples) < len(SIZES)
        assert rank["took"] < 8


class _Clock(TorchFunctionMode):
    """A clock that products and collectives move, however busy the machine is."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.mm:
            return func(*args, **kwargs or {})
        self.now += 1e-3
        return None


def _measure_by_clock() -> list[LinkRecord]:
    clock = _Clock()

    def start(whole: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        clock.now += _SLOW
        return c10d_functional.all_reduce(whole, "sum", group)

    slow = Collective(c10d_functional.broadcast.default, Role.ALL_REDUCE, shares=lambda n: n - 1, start=start)
    with pytest.MonkeyPatch.context() as patch, clock:
        patch.setattr(calibration, "time", clock)
        return measure_collectives(dist.new_group(), device_type="cpu", seconds=20.0, kinds=(slow,))


@pytest.mark.distributed
def test_products_are_delayed_by_a_collective_that_computes(ranks):
    for (record,) in ranks(2).run(_measure_by_clock):
        assert record.latency_s == pytest.approx(_SLOW)
        assert record.delay == pytest.approx(1), "products wait while it starts"

"""`plan_offload`: what lies on disk, by a limit of memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

import dsgraph
from dsgraph.offload.slots import first_of, share_of
from dsgraph.offload.stored_rows import stored_rows
from dsgraph.optim.disk_optimizer import DiskOptimizer
from dsgraph.optim.host_optimizer import HostOptimizer
from dsgraph.optim.plan_offload import plan_offload
from dsgraph.utils.errors import OffloadError

MB = 10**6
WIDTH, LAYERS = 3200, 4  # 41 million parameters, 655 MB of states


def _model() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


STATES = 16 * LAYERS * WIDTH**2


def test_what_fits_stays_in_memory():
    plan = plan_offload(_model(), memory_limit=STATES, folder="/scratch")
    assert (plan.offload, plan.optimizer_ratio, plan.memory_bytes, plan.below_bytes) == (None, 0, STATES, 0)
    optimizer = optim.AdamW(nn.Linear(4, 4).parameters())
    assert plan.take(optimizer) is optimizer


def test_the_state_of_the_optimizer_goes_first(tmp_path):
    plan = plan_offload(_model(), memory_limit=600 * MB, folder=tmp_path / "new")
    assert plan.parameters_ratio == 0
    assert 0 < plan.optimizer_ratio < 1
    chunk = 8 * WIDTH**2  # the state of one parameter; a step has two such buffers
    assert (plan.memory_bytes, plan.below_bytes, plan.buffer_bytes) == (STATES - chunk, 3 * chunk, 2 * chunk)
    optimizer = plan.take(optim.AdamW(nn.Linear(512, 512).parameters()))
    assert isinstance(optimizer, DiskOptimizer)
    assert optimizer.path.is_relative_to(tmp_path / "new")


def test_parameters_go_then():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(500)))
    plan = plan_offload(model, memory_limit="2GB", folder="/scratch")
    assert plan.optimizer_ratio == 1
    assert plan.offload is not None
    assert plan.offload["parameters"] == "disk"
    assert 0 < plan.offload["ratio"]["parameters"] < 1
    assert 0 <= 2000 * MB - plan.memory_bytes < 2 * 4 * 1024**2, "one parameter and its gradient more would not fit"
    assert plan.limit_of_graphs(3000 * MB) == 3000 * MB - plan.buffer_bytes
    assert "100% of the optimizer's state" in str(plan)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_cannot_fit_is_refused_with_the_least_that_can(stage, ranks):
    arguments = {"folder": "/scratch", "stage": stage, "ranks": ranks}
    with pytest.raises(OffloadError, match=r"need [\d,]+ at least") as error:
        plan_offload(_model(), memory_limit=MB, **arguments)
    least = int(str(error.value).partition("need ")[2].partition(" at least")[0].replace(",", ""))
    assert ("stage 3 would take less" in str(error.value)) is (stage != 3)
    assert plan_offload(_model(), memory_limit=least, **arguments).memory_bytes <= least
    with pytest.raises(OffloadError, match="at least"):
        plan_offload(_model(), memory_limit=least - 1, **arguments)


@settings(max_examples=30)
@given(limit=st.integers(MB, 2 * STATES), stage=st.integers(0, 3), ranks=st.integers(1, 5))
def test_no_plan_takes_more_than_the_limit(limit, stage, ranks):
    try:
        plan = plan_offload(_model(), memory_limit=limit, folder="/scratch", stage=stage, ranks=ranks)
    except OffloadError:
        return
    assert plan.memory_bytes <= limit
    assert 0 <= plan.parameters_ratio <= plan.optimizer_ratio <= 1


@pytest.mark.parametrize("limit", ["much", 0])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(OffloadError, match="memory_limit is"):
        plan_offload(_model(), memory_limit=limit, folder="/scratch")


def test_a_model_takes_what_the_plan_says(one_rank, tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(60)))
    plan = plan_offload(model, memory_limit=500 * MB, folder=tmp_path)
    assert 0 < plan.parameters_ratio < 1
    done = []
    dsgraph.partition(model, stage=3, offload=plan.offload)
    dsgraph.materialize(model, "cpu", progress=lambda *counts: done.append(counts))
    assert done == [(number * 1024**2, 60 * 1024**2) for number in range(1, 61)]
    optimizer = plan.take(optim.AdamW(model.parameters()))
    files = {path.name: path.stat().st_size for path in Path(tmp_path).rglob("*") if path.is_file()}
    stored = sum(stored_rows(param.to_local()) is not None for param in model.parameters())
    assert stored == -(-plan.parameters_ratio * 60 // 1)
    assert isinstance(optimizer, DiskOptimizer)
    assert plan.below_bytes == files["parameters"] + files["optimizer-state"]


@given(sizes=st.lists(st.integers(1, 10**12), min_size=1, max_size=50), data=st.data())
def test_a_share_of_whole_pieces_makes_as_many_of_them(sizes, data):
    count = data.draw(st.integers(0, len(sizes)))
    assert first_of(sizes, share_of(sizes, count)) == count


def _to_host(limit: int | str, host: int | str | None = None, dtype: torch.dtype = torch.float32, **more):
    return plan_offload(_model().to(dtype), memory_limit=limit, host_memory_limit=host, device="cuda", **more)


def test_below_a_gpu_lies_the_host():
    plan = _to_host(450 * MB, "2GB")
    assert plan.tier == "host" and 0 < plan.optimizer_ratio < 1 and plan.parameters_ratio == 0
    state = 8 * WIDTH**2  # of one parameter; that of three has to go
    assert plan.memory_bytes == STATES - 3 * state <= 450 * MB, "no buffers on the device"
    travelling, masters = 2 * state, 3 * state // 2
    assert plan.below_bytes == 3 * state + masters + travelling
    assert plan.offload == {"optimizer": "host", "ratio": {"optimizer": plan.optimizer_ratio}}
    assert isinstance(plan.take(optim.AdamW(nn.Linear(4, 4).parameters())), HostOptimizer)
    assert "host" in str(plan)


def test_masters_of_16_bits_count():
    plan = _to_host(300 * MB, "2GB", torch.bfloat16)
    count = LAYERS * WIDTH**2
    state = 12 * WIDTH**2  # of one parameter, with its master; three of four have to go
    assert plan.memory_bytes == 4 * count + state
    assert plan.below_bytes == 3 * state + 2 * state
    assert _to_host(8 * count, "2GB", torch.bfloat16).optimizer_ratio == 0, "what fits keeps the state that it has"


@pytest.mark.parametrize("host", [100 * MB, 400 * MB])
def test_what_the_host_cannot_hold_is_refused_with_the_least_limits(host):
    with pytest.raises(OffloadError, match="set host_memory_limit to") as error:
        _to_host(400 * MB, host)
    least_host, least_device = map(int, re.findall(r"to (\d+) or more", str(error.value).replace(",", "")))
    assert _to_host(400 * MB, least_host).below_bytes <= least_host
    assert _to_host(least_device, host).memory_bytes <= least_device
    for device, on_host in ((400 * MB, least_host - 1), (least_device - 1, host)):
        with pytest.raises(OffloadError):
            _to_host(device, on_host)


def test_limits_of_the_other_device_are_refused():
    with pytest.raises(OffloadError, match="folder has no effect yet on cuda"):
        _to_host("1GB", folder="/scratch")
    with pytest.raises(OffloadError, match="host_memory_limit has no effect on the CPU"):
        plan_offload(_model(), memory_limit="1GB", host_memory_limit="1GB")
    with pytest.raises(OffloadError, match="set folder, or set memory_limit to"):
        plan_offload(_model(), memory_limit=600 * MB)

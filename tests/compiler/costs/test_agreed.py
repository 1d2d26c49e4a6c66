"""Costs as passes see them: the same on all ranks, from the first rank's host alone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dsgraph
from dsgraph.compiler.costs.agreed import KnownCosts
from dsgraph.compiler.costs.calibration_record import TierRecord
from dsgraph.compiler.costs.host import device_name, host_name
from dsgraph.compiler.costs.store import save
from dsgraph.passes.analysis.hardware import DEVICES, LINKS, PRODUCTS, TIERS, Link
from dsgraph.ranks.mesh import mesh_axes
from tests.compiler.costs.records import LINK, calibration

EAGER = {"codegen": "eager"}
WHERE = f"measured on node-7 ({calibration().device}), {calibration().time}"


def _model(known: KnownCosts, *axes: str, shape: tuple[int, ...] = (8,), names: tuple[str, ...] = ("shard",)) -> Any:
    """The links by axis, the model, and what is said of it, for a mesh of the fake group."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    chosen = [replace(axis, backend="gloo") for axis in mesh_axes(mesh) if axis.name in (axes or names)]
    model = known.model(mesh, chosen)
    links = {axis.name: model.links[axis.group] for axis in chosen}
    return SimpleNamespace(links=links, model=model, said=known.describe(mesh, chosen))


def _known(*links: Any, hosts: list[str] | None = None, **changes: Any) -> KnownCosts:
    hosts = hosts or ["node-7"] * 8
    record = calibration(links=links, **changes)
    return KnownCosts(record, 2, dict(enumerate(hosts)), device_type=record.device_type, device=record.device)


def test_measured_figures_are_those_of_the_model(fake_ranks):
    found = _model(_known(LINK))
    assert found.model.device.flops_per_s == 6e10
    assert (found.model.device.bytes_per_s, found.model.device.kernel_s) == (9e9, 2e-6)
    # An all-reduce of two ranks takes two steps.
    assert found.links["shard"].of("all_reduce") == Link(2e-4, 2e9, 0.5)
    assert found.links["shard"].of("all_to_all_single") == LINKS["gloo"].of("all_to_all_single")
    assert found.said == WHERE
    group = next(iter(found.model.links))
    sent = LINK.samples[1][0]
    two = replace(found.model, axes=(replace(found.model.axes[0], size=2),))
    assert two.transfer_seconds("all_reduce", group, sent) == pytest.approx(LINK.latency_s + sent / LINK.bytes_per_s)


NONE = "node-7 has no calibration (dsgraph calibrate makes one)"


@pytest.mark.parametrize(
    ("device_type", "device", "product", "said"),
    [
        ("cpu", "AMD EPYC", None, "defaults"),
        ("cuda", "NVIDIA H100 80GB HBM3", "H100", "defaults for H100"),
        ("cuda", "NVIDIA GB10", None, "defaults for an A100-class GPU, as 'NVIDIA GB10' is not known"),
    ],
)
def test_without_a_calibration_the_data_sheet_of_the_first_ranks_device_counts(
    fake_ranks, device_type, device, product, said
):
    found = _model(KnownCosts(None, 2, {0: "node-7"}, device_type=device_type, device=device))
    expected = PRODUCTS[product] if product else SimpleNamespace(device=DEVICES[device_type], tiers=TIERS[device_type])
    assert (found.model.device, found.model.tiers) == (expected.device, expected.tiers)
    assert found.said == f"{said}: {NONE}"


def test_a_measured_link_to_the_host_counts_and_a_missing_one_is_named(fake_ranks):
    gpu = {"device_type": "cuda", "device": "NVIDIA H200", "threads": 0}
    host = TierRecord("host", latency_s=2e-5, bytes_per_s=4e10)
    found, older = _model(_known(LINK, tiers=(host,), **gpu)), _model(_known(LINK, **gpu))
    assert found.model.tiers == {**TIERS["cuda"], "host": Link(2e-5, 4e10)}
    assert older.model.tiers == PRODUCTS["H200"].tiers
    assert older.said == f"{found.said}; link to the host by default"


def test_latencies_of_nccl_are_measured_and_used_by_the_same_steps(fake_ranks):
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("shard",))
    axes = [replace(axis, backend="nccl") for axis in mesh_axes(mesh)]
    known = _known(replace(LINK, backend="nccl", ranks=8, latency_s=6e-5), device_type="cuda", threads=0)
    model, (group,) = known.model(mesh, axes), [axis.group for axis in axes]
    assert model.transfer_seconds("all_reduce", group, 0) == pytest.approx(6e-5)


def test_the_nearest_size_of_the_same_backend_counts(fake_ranks):
    four, two = replace(LINK, ranks=4, latency_s=1.0), replace(LINK, latency_s=3.0)
    other = replace(LINK, ranks=8, backend="nccl", latency_s=5.0)
    assert _model(_known(two, four, other)).links["shard"].of("all_reduce").latency_s == 1.0 / 6
    assert _model(_known(other)).links["shard"] == LINKS["gloo"]
    assert _model(_known(other)).said == f"{WHERE}; links of shard by default"


def test_links_between_hosts_and_within_one_are_told_apart(fake_ranks):
    within, across = replace(LINK, ranks=4, bytes_per_s=4e9), replace(LINK, ranks=8, hosts=2, bytes_per_s=1e8)
    hosts = ["node-7"] * 4 + ["node-8"] * 4
    mesh = {"shape": (2, 4), "names": ("replicate", "shard")}
    links = _model(_known(within, across, hosts=hosts), **mesh).links
    assert links["shard"].of("all_reduce").bytes_per_s == 4e9
    assert links["replicate"].of("all_reduce").bytes_per_s == 1e8
    found = _model(_known(within, hosts=hosts), **mesh)
    assert found.links["replicate"] == LINKS["gloo"]
    assert found.said == f"{WHERE}; links of replicate by default"
    assert _model(_known(within, hosts=hosts), "shard", **mesh).said == WHERE
    # With the axes the other way round the first rank's group of each is another one.
    turned = _model(_known(within, across, hosts=["node-7", "node-8"] * 4), **mesh).links
    assert turned["shard"].of("all_reduce").bytes_per_s == 1e8
    assert turned["replicate"].of("all_reduce").bytes_per_s == 4e9


def test_a_cpu_multiplies_in_proportion_to_its_threads(fake_ranks):
    known = replace(_known(LINK), threads=1)
    assert _model(known).model.device.flops_per_s == 3e10
    gpu = calibration(threads=0, device_type="cuda", flops_per_s={"float32": 5e13, "bfloat16": 6e14})
    device = _model(replace(known, calibration=gpu, device_type="cuda")).model.device
    assert [device.rate(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [5e13, 6e14, 6e14]


def test_a_model_is_written_alike_each_time(fake_ranks):
    links = [replace(LINK, kind=kind) for kind in ("all_reduce", "all_to_all_single", "broadcast")]
    models = [_model(_known(*order)).model for order in (links, links[::-1])]
    assert repr(models[0]) == repr(models[1])


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    before = os.environ["XDG_CACHE_HOME"]
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ["XDG_CACHE_HOME"] = before


def _compile(cache: Path, *, own_file_on: tuple[int, ...], damaged: bool = False) -> dict[str, Any]:
    """Compiles twice, the second time another graph; returns what passes and the report knew of costs."""
    seen = []

    @dsgraph.graph_pass(phase="forward")
    def look(gm: Any, ctx: dsgraph.PassContext) -> int:
        seen.append(ctx.costs)
        return 0

    rank = dist.get_rank()
    with _cache(cache / str(rank)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank in own_file_on:
            record = calibration(host=host_name(), device=device_name("cpu"), kernel_s=1e-3 * (1 + rank))
            path = save(record)
            if damaged:
                path.write_text(path.read_text()[:-20])
        model = dsgraph.partition(nn.Linear(8, 8), keep_whole_below=0)
        options = {**EAGER, "pipeline": dsgraph.default_pipeline() + [look]}
        compiled = torch.compile(model, backend=dsgraph.api.new_backend(), options=options, dynamic=False)
        for batch in (2, 3):
            compiled(torch.ones(batch, 8)).sum().backward()
    return {
        "costs": [(costs.device, list(costs.links.values())) for costs in seen],
        "warnings": [str(item.message) for item in caught if "calibration" in str(item.message)],
    }


@pytest.mark.distributed
@pytest.mark.parametrize("own_file_on", [(0,), (0, 1)])
def test_all_ranks_have_the_first_ranks_costs(ranks, tmp_path, own_file_on):
    first, other = ranks(2).run(_compile, tmp_path, own_file_on=own_file_on)
    assert first == other
    assert len(first["costs"]) == 2
    for device, (links,) in first["costs"]:
        assert device.kernel_s == 1e-3
        assert links.of("all_reduce") == Link(2e-4, 2e9, 0.5)
    assert first["warnings"] == []


@pytest.mark.distributed
@pytest.mark.parametrize(("own_file_on", "damaged"), [((), False), ((1,), False), ((0, 1), True)])
def test_otherwise_all_ranks_have_the_defaults(ranks, tmp_path, own_file_on, damaged):
    found = ranks(2).run(_compile, tmp_path, own_file_on=own_file_on, damaged=damaged)
    for rank in found:
        assert rank["costs"] == [(DEVICES["cpu"], [LINKS["gloo"]])] * 2
    told = [rank["warnings"] for rank in found]
    assert told[1] == []
    if not damaged:
        assert told[0] == []
        return
    (message,) = told[0]  # once, though two graphs were compiled
    for part in ("default costs are used", str(tmp_path / "0"), "is damaged", "dsgraph calibrate"):
        assert part in message


class _Twice(nn.Linear):
    """Has a forward of its own: a report lists what else was compiled for the same function."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_the_report_says_that_costs_are_measured(one_rank, tmp_path):
    with _cache(tmp_path):
        save(calibration(host=host_name(), device=device_name("cpu")))
        model = dsgraph.partition(_Twice(8, 8), keep_whole_below=0)
        compiled = torch.compile(model, backend="dsgraph", options=EAGER)
        compiled(torch.ones(2, 8))
        found = dsgraph.report(compiled)
    where = f"measured on {host_name()} ({device_name('cpu')}), {calibration().time}"
    assert found.costs == where
    assert f"costs: {where}" in " ".join(str(found).split())

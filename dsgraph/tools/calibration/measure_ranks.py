"""Measurements over the ranks of a running process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dsgraph import __version__
from dsgraph.compiler.costs.calibration_record import FORMAT, VERSION, CalibrationRecord, LinkRecord, TierRecord
from dsgraph.compiler.costs.host import device_name, host_name
from dsgraph.ranks.local_rank import local_rank

from .device import DeviceFigures, measure_device
from .measure_collectives import measure_collectives, now


@dataclass(frozen=True)
class _Place:
    """Where a rank runs."""

    host: str
    devices: tuple[str, ...]  # the types of device that it has one of for itself


def measure_ranks(device_types: Sequence[str] | None = None, *, seconds: float) -> list[CalibrationRecord]:
    """Measure this process's devices and the links to the other ranks.

    All ranks of the default process group call it, which must be able to send what lies on the CPU. Links are measured
    over all ranks, and, where they are spread over hosts, also among those of one host.

    Args:
        device_types: "cpu", "cuda", ...; None for all that every rank has one of.
        seconds: How long the collectives may take together; devices take some five seconds besides.

    Returns:
        One calibration for each type of device, with the names and the figures of the first rank; the same everywhere.
    """
    places = _gathered(_Place(host_name(), _own_devices()))
    common = [kind for kind in places[0].devices if all(kind in place.devices for place in places)]
    chosen = [kind for kind in common if device_types is None or kind in device_types]
    groups = _rank_groups([place.host for place in places])
    share = seconds / max(1, len(chosen) * len(groups))
    found = []
    for device_type in chosen:
        figures = measure_device(device_type, together=dist.barrier)
        links: list[LinkRecord] = []
        for ranks_of_groups in groups:
            links += _links(ranks_of_groups, [place.host for place in places], device_type, seconds=share)
        found.append(_record(device_type, figures, tuple(links)))
    records: list[list[CalibrationRecord]] = _gathered(found)
    return records[0]


def _own_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if accelerator is None or here > devices:
        return ("cpu",)
    torch.accelerator.set_device_index(local_rank(devices))
    return ("cpu", accelerator.type)


def _rank_groups(hosts: Sequence[str]) -> list[list[list[int]]]:
    """Return the groups to measure: ways to part the ranks, the parts of one being measured at the same time."""
    if len(hosts) == 1:
        return []
    everyone = [list(range(len(hosts)))]
    by_host = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    is_even = len({len(ranks) for ranks in by_host}) == 1
    return [everyone, by_host] if len(by_host) > 1 and is_even and len(by_host[0]) > 1 else [everyone]


def _links(
    ranks_of_groups: list[list[int]], hosts: Sequence[str], device_type: str, *, seconds: float
) -> list[LinkRecord]:
    backend = dist.get_default_backend_for_device(device_type)
    group, _ = dist.new_subgroups_by_enumeration(ranks_of_groups, backend=backend)
    assert group is not None  # each way to divide the ranks contains all of them
    spread = len({hosts[rank] for rank in ranks_of_groups[0]})
    links = measure_collectives(group, device_type=device_type, seconds=seconds, hosts=spread)
    dist.destroy_process_group(group)
    return links


def _record(device_type: str, figures: DeviceFigures, links: tuple[LinkRecord, ...]) -> CalibrationRecord:
    host = figures.host
    return CalibrationRecord(
        format=FORMAT,
        version=VERSION,
        host=host_name(),
        device=device_name(device_type),
        device_type=device_type,
        time=now(),
        dsgraph=__version__,
        torch=torch.__version__,
        threads=torch.get_num_threads() if device_type == "cpu" else 0,
        flops_per_s=figures.flops_per_s,
        bytes_per_s=figures.bytes_per_s,
        kernel_s=figures.kernel_s,
        links=links,
        tiers=() if host is None else (TierRecord("host", host.latency_s, host.bytes_per_s, host.error),),
    )


def _gathered(value: Any) -> list[Any]:
    """Return every rank's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

"""The record of a calibration: plain data, written as JSON and read back without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from dsgraph.utils.json_records import HeadRecord, RecordError, from_json_text, to_json_text

FORMAT = "dsgraph-calibration"
VERSION = 1
# The least value of each measurement: rates must be above 0, times may be 0.
_LEAST = {"ranks": 2, "hosts": 1, "threads": 0, "kernel_s": 0.0, "latency_s": 0.0, "delay": 0.0, "bytes_per_s": 1e-12}


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """The speed of one kind of collective over one kind of group: n bytes sent take `latency_s + n / bytes_per_s`.

    Attributes:
        backend: "gloo", "nccl", ...
        ranks: Number of ranks of the group.
        hosts: Number of hosts of these ranks.
        kind: Name of the op, without namespace and overload.
        latency_s: Seconds that a collective of no bytes takes, from its start to its end.
        bytes_per_s: Bytes that each rank sends a second.
        error: Median relative deviation of the measured seconds from that line.
        samples: Bytes that each rank sent, and the seconds (a median) that it took the slowest rank.
        time: When it was measured, ISO 8601.
        delay: Seconds by which a second of a collective delays what is computed beside it; one figure for all kinds.
    """

    backend: str
    ranks: int
    hosts: int
    kind: str
    latency_s: float
    bytes_per_s: float
    error: float = 0.0
    samples: tuple[tuple[int, float], ...] = ()
    time: str = ""
    delay: float = 0.0

    @property
    def group(self) -> tuple[str, int, int]:
        """The kind of group: backend, ranks, hosts."""
        return self.backend, self.ranks, self.hosts


@dataclass(frozen=True, slots=True)
class TierRecord:
    """The speed of the link to a tier of offloaded tensors: n bytes take `latency_s + n / bytes_per_s`, each way.

    Attributes:
        tier: "host".
        latency_s: Seconds that a transfer of no bytes takes.
        bytes_per_s: Bytes a second, of the slower direction.
        error: Median relative deviation of the measured seconds from that line.
    """

    tier: str
    latency_s: float
    bytes_per_s: float
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """The measured speed of one kind of device on one host, and of the links between such devices.

    Attributes:
        format: FORMAT.
        version: VERSION of the dsgraph that wrote it.
        host: Name of the host.
        device: Name of the device: "AMD EPYC", "NVIDIA H200".
        device_type: "cpu", "cuda", ...
        time: When the device was measured, ISO 8601.
        dsgraph: Version.
        torch: Version.
        threads: Number of threads of a rank, on a CPU; 0 on other devices.
        flops_per_s: Dtype -> floating-point operations a second of a large matrix product.
        bytes_per_s: Bytes a second that a large copy reads and writes.
        kernel_s: Seconds of a kernel that does next to nothing.
        links: Of every kind of group and collective that was measured.
        tiers: Of every tier that was measured; none on a CPU, and in files of versions that did not measure any.
    """

    format: str
    version: int
    host: str
    device: str
    device_type: str
    time: str
    dsgraph: str
    torch: str
    threads: int
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    kernel_s: float
    links: tuple[LinkRecord, ...] = field(default=())
    tiers: tuple[TierRecord, ...] = field(default=())


def to_text(record: CalibrationRecord) -> str:
    """Return a calibration as JSON."""
    return to_json_text(record)


def from_text(text: str | bytes) -> CalibrationRecord:
    """Return the calibration in a JSON text.

    Raises:
        RecordError: It is not one, is of another version, or contains an impossible number.
    """
    head = from_json_text(HeadRecord, text)
    if head.format != FORMAT:
        raise RecordError(f"its format is {head.format!r}, not {FORMAT!r}")
    if head.version != VERSION:
        raise RecordError(f"it is of version {head.version}, and this dsgraph reads version {VERSION}")
    record = from_json_text(CalibrationRecord, text)
    for name, value, least in _figures(record):
        if not (math.isfinite(value) and value >= least):
            raise RecordError(f"{name} is {value}")
    return record


def merge(new: CalibrationRecord, old: CalibrationRecord | None) -> CalibrationRecord:
    """Return `new`, with the links of `old` between groups that `new` has not measured."""
    measured = {link.group for link in new.links}
    kept = tuple(link for link in (old.links if old is not None else ()) if link.group not in measured)
    return replace(new, links=new.links + kept)


def _figures(record: CalibrationRecord) -> Iterator[tuple[str, float, float]]:
    """Yield name, value and least value of all measurements."""
    yield "flops_per_s: how many", len(record.flops_per_s), 1
    for dtype, rate in record.flops_per_s.items():
        yield f"flops_per_s.{dtype}", rate, _LEAST["bytes_per_s"]
    links = [(f"links.{number}.", link) for number, link in enumerate(record.links)]
    tiers = [(f"tiers.{number}.", tier) for number, tier in enumerate(record.tiers)]
    for place, each in (("", record), *links, *tiers):
        for name in filter(partial(hasattr, each), _LEAST):
            yield place + name, getattr(each, name), _LEAST[name]

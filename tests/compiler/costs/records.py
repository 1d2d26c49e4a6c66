"""A calibration for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dsgraph.compiler.costs.calibration_record import FORMAT, VERSION, CalibrationRecord, LinkRecord

LINK = LinkRecord(
    backend="gloo",
    ranks=2,
    hosts=1,
    kind="all_reduce",
    latency_s=4e-4,
    bytes_per_s=2e9,
    error=0.1,
    samples=((512, 4e-4), (1 << 20, 9e-4)),
    time="2026-01-02T03:04:05+00:00",
    delay=0.5,
)


def calibration(**changes: Any) -> CalibrationRecord:
    record = CalibrationRecord(
        format=FORMAT,
        version=VERSION,
        host="node-7",
        device="AMD EPYC 9654 96-Core",
        device_type="cpu",
        time="2026-01-02T03:04:05+00:00",
        dsgraph="0.1.0",
        torch="2.13.0",
        threads=2,
        flops_per_s={"float32": 6e10},
        bytes_per_s=9e9,
        kernel_s=2e-6,
        links=(LINK,),
    )
    return replace(record, **changes)

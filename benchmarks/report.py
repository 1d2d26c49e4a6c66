"""How every benchmark reports: rows that were measured, checks of them against figures to reach, and the machine.

`--json FILE` writes `{"rows": [...], "checks": [...], "machine": {...}}`. A missed figure is reported, not hidden, and
is no failure: a benchmark exits with 0 unless the run itself failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from tabulate import tabulate

MB = 10**6  # bytes in every column called `_mb`

Row = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One figure to reach.

    Attributes:
        name: What was measured, in relation to what.
        value: The figure; None when the run did not measure it.
        limit: The figure to reach.
        better: Whether values below or above the limit reach it. The limit itself does.
    """

    name: str
    value: float | None
    limit: float
    better: Literal["lower", "higher"]

    @property
    def ok(self) -> bool:
        """True if the target was reached; False if it was not measured."""
        if self.value is None or math.isnan(self.value):
            return False
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit

    def as_dict(self) -> Row:
        """Return the check as it stands in the JSON file."""
        return {"name": self.name, "value": self.value, "limit": self.limit, "better": self.better, "ok": self.ok}


@dataclass
class Report:
    """The results of one run.

    Attributes:
        rows: One dictionary for each measured case. None stands for a value that could not be measured.
        checks: One for each target.
        machine: The machine, see `machine`.
    """

    rows: list[Row] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    machine: Row = field(default_factory=lambda: machine())

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return {"rows": self.rows, "checks": [check.as_dict() for check in self.checks], "machine": self.machine}

    def write(self, path: Path | None) -> None:
        """Write the JSON file; nothing when no path was given."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n")

    def print(self, columns: Sequence[Row] | None = None) -> None:
        """Print machine, rows and check; `columns` stands in for rows where the table should show more."""
        print(", ".join(f"{key} {value}" for key, value in self.machine.items() if value is not None))
        print(table(self.rows if columns is None else columns))
        if self.checks:
            print(table([_in_words(check) for check in self.checks]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all benchmarks have."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows, checks and machine to FILE")
    parser.add_argument("--quick", action="store_true", help="a smoke run in under a minute; its figures mean nothing")


def machine(packages: Sequence[str] = ()) -> Row:
    """Describe the machine: processor, cores, memory (GB of 10**9 bytes), load, system, versions, date (UTC).

    Args:
        packages: Distributions whose versions matter besides torch's; None stands for one that is not installed.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": None if memory is None else round(memory / 1e9, 1),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", *packages)},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def describe_gpu() -> Row:
    """Return name, driver and memory of the first GPU, asked of the driver's tool: no CUDA context is made."""
    fields = {"gpu": "name", "driver": "driver_version", "gpu_memory": "memory.total"}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(fields)
    return dict(zip(fields, lines[0].split(", "), strict=True))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as text: four significant digits, but losses in full; `-` for what could not be measured."""
    formats = [".7f" if name == "loss" else ".4g" for name in (rows[0] if rows else ())]
    return tabulate(rows, headers="keys", floatfmt=formats, missingval="-", tablefmt="simple")


def ratio(value: float | None, over: Sequence[float | None]) -> float | None:
    """Return `value` over the smallest of `over`; None when either is missing."""
    known = [other for other in over if other]
    return None if value is None or not known else value / min(known)


def _in_words(check: Check) -> Row:
    relation = "at most" if check.better == "lower" else "at least"
    result = "not measured" if check.value is None else "reached" if check.ok else "MISSED"
    return {"figure": check.name, "value": check.value, "to reach": f"{relation} {check.limit:g}", "": result}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None

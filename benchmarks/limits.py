"""The cost of a `memory_limit`: activations of ten times the limit, with the disk; planning of many layers.

    python -m benchmarks.limits --json limits.json

One rank, codegen "eager", on the disk of `TMPDIR`; stage 0 but for the last case. Columns:
    case        `disk`: a GPT of 24 layers with `activation_offload="disk"`; `planning`: one of 96 layers, limit 0.7;
                `planning, blocks`: the same at stage 3, where one plan is made for all blocks
    saved_mb    MB that the forward saves without a limit
    limit_mb    `memory_limit`: a tenth of that, or 0.7 of the peak without a limit
    peak_mb     most bytes of tensors alive at once in a step, counted at torch's allocator
    step_s      seconds a step, median
    free_s      the same without a limit, steps in turns
    moved_mb    MB written to the disk and read again in a step
    disk_s      seconds in which a plain program writes as much, waits for the disk, and reads it again
    plan_s      seconds of planning, for blocks with those of the step on fake tensors
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.activations import TURNS, Training
from benchmarks.memory import build_counter
from benchmarks.report import MB, Check, Report, Row, add_arguments, machine
from benchmarks.workers import Workers

_PIECE = 4 * 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, whatever the figures are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    suffix = "-quick" if options.quick else ""
    report = Report(machine=machine(["scipy"]))
    with tempfile.TemporaryDirectory() as folder:
        counter = build_counter(Path(folder))
        if counter is None:
            print("no C++ compiler ($CXX, by default g++): nothing counts bytes", file=sys.stderr)
            return 1
        # A tenth of a small model's activations is less than its parameters.
        share = 0.5 if options.quick else 0.1
        report.rows = [_disk(f"disk{suffix}", share, counter), *_plannings(f"planning{suffix}", counter)]
    report.checks = checks(report.rows)
    report.print()
    report.write(options.json)
    return 0


def _disk(case: str, share: float, counter: Path) -> Row:
    with Workers("free", Training, case, "eager", {}, counter, world=1) as free:
        (usual,) = free.call("warm_up")
        limit = int(share * usual["saved"])
        how = {"limit": limit, "offload": "disk"}
        with Workers("limited", Training, case, "eager", how, counter, world=1) as limited:
            (found,) = limited.call("warm_up")
            steps: list[float] = []
            usual_steps: list[float] = []
            disk: list[float] = []
            for _ in range(TURNS):
                steps += limited.call("turn")[0]
                usual_steps += free.call("turn")[0]
                disk.append(_disk_seconds(found["moved"]))
    return {
        **{"case": "disk", "saved_mb": usual["saved"] / MB, "limit_mb": limit / MB, "peak_mb": found["peak"] / MB},
        **{"step_s": statistics.median(steps), "free_s": statistics.median(usual_steps)},
        **{"moved_mb": found["moved"] / MB, "disk_s": statistics.median(disk), "plan_s": found["plan_s"]},
    }


def _plannings(case: str, counter: Path) -> list[Row]:
    return [_planning("planning", case, 0, counter), _planning("planning, blocks", case, 3, counter)]


def _planning(name: str, case: str, stage: int, counter: Path) -> Row:
    with Workers("free", Training, case, "eager", {"stage": stage}, counter, world=1) as free:
        (usual,) = free.call("warm_up")
    limit = int(0.7 * usual["predicted"])
    with Workers("limited", Training, case, "eager", {"limit": limit, "stage": stage}, counter, world=1) as limited:
        (found,) = limited.call("warm_up")
        seconds = found["plan_s"] + (limited.call("fake_step")[0] if stage else 0)
    return {
        **{"case": name, "saved_mb": None if stage else usual["saved"] / MB, "limit_mb": limit / MB},
        **{"peak_mb": found["peak"] / MB, "plan_s": seconds},
        **dict.fromkeys(("step_s", "free_s", "moved_mb", "disk_s")),
    }


def _disk_seconds(size: int) -> float:
    """Return the seconds in which so many bytes are written to a file, past the page cache, and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plain"
        piece = memoryview(os.urandom(_PIECE))
        started = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for start in range(0, size, _PIECE):
                file.write(piece[: size - start])
            os.fsync(file.fileno())
        written = time.perf_counter() - started
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            while file.read(_PIECE):
                pass
        return written + time.perf_counter() - started


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the figures to reach, from the rows that were measured."""
    cases = ("disk", "planning", "planning, blocks")
    disk, planning, blocks = (next(row for row in rows if row["case"] == case) for case in cases)
    bound = max(disk["free_s"], disk["disk_s"])
    return [
        Check("disk: saved without a limit, over the limit", disk["saved_mb"] / disk["limit_mb"], 10.0, "higher"),
        Check("disk: measured peak over the limit", disk["peak_mb"] / disk["limit_mb"], 1.0, "lower"),
        Check("disk: step over max(free step, disk)", disk["step_s"] / bound, 1.3, "lower"),
        Check("planning, 96 layers: seconds", planning["plan_s"], 10.0, "lower"),
        Check("planning, 96 blocks: seconds", blocks["plan_s"], 2.0, "lower"),
    ]


if __name__ == "__main__":
    sys.exit(main())

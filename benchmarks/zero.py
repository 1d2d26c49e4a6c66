"""ZeRO side by side: DDP, FSDP2, DeepSpeed and dsgraph, with the same model, data, optimizer and ranks, in one run.

    python -m benchmarks.zero --json out.json

Columns, over the ranks of a system:
    step_s        seconds a step: forward, backward, optimizer; the slowest rank, median over steps taken in turn
    peak_mb       most bytes of tensors alive at once on a rank in a step, in 10**6
    first_step_s  seconds of the first step, which compiles with empty caches
    wire_mb       bytes that a rank must send a step, in 10**6, see `benchmarks.wire`
    loss          mean over the ranks, in the 20th step

The printed table adds step time and peak memory over those of the best peer of the same memory class.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.comparison import WARM_UP, Comparison
from benchmarks.memory import build_counter
from benchmarks.report import Check, Report, Row, add_arguments, machine, ratio
from benchmarks.systems import SYSTEMS, installed
from benchmarks.training import Workload

LOSS_STEP = 20  # whose loss is compared
LEAST_STEPS = LOSS_STEP - WARM_UP

QUICK = ("single", "ddp", "fsdp2", "dsgraph-3-eager")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 when a system failed, otherwise 0, whatever the figures are."""
    options = _parse(arguments)
    workload = Workload(batch=options.batch, length=options.time, world=options.world)
    workload = workload.quick() if options.quick else workload
    report = Report(machine=machine(["deepspeed"]))
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        counter = build_counter(Path(folder))
        if counter is None:
            print("no C++ compiler: peak_mb is not measured", flush=True)
        found: dict[str, Row] = {}
        for heat in heats(installed(options.systems, SYSTEMS)):
            comparison = Comparison(workload, counter, systems=SYSTEMS, loss_step=LOSS_STEP)
            try:
                for name in heat:
                    comparison.start(name)
                comparison.take_turns(options.steps)
                found |= comparison.rows()
            finally:
                comparison.close()
                errors += comparison.errors
        report.rows = [found[name] for name in options.systems if name in found]
    report.checks = checks(report.rows, world=workload.world)
    report.print(with_ratios(report.rows))
    _print_compile_times(report.rows)
    report.write(options.json)
    for error in errors:
        print(f"\nFAILED {error}", file=sys.stderr)
    return 1 if errors else 0


def heats(names: Sequence[str]) -> list[list[str]]:
    """Return the systems whose steps are timed in turns: stage 3 and the references first, then those that keep more.

    Twenty systems at once do not fit into the memory of a small machine (1 GB a rank, most of it compiler). Ratios are
    taken within a heat.
    """
    first = [name for name in names if SYSTEMS[name].memory in (3, None)]
    second = [name for name in names if name not in first]
    return [heat for heat in (first, second) if heat]


def checks(rows: Sequence[Row], *, world: int) -> list[Check]:
    """Return the figures to reach, from the rows that were measured."""
    by_name = {row["system"]: row for row in rows}
    peers = [name for name in by_name if SYSTEMS[name].is_peer and SYSTEMS[name].memory == 3]
    among = f"of {', '.join(peers)}" if peers else "peer (none took part)"
    ours = by_name.get("dsgraph-3", {})
    losses = _loss_differences(by_name)
    worst = max(losses, key=lambda name: losses[name], default=None)
    of_losses = f"largest of {len(losses)}, {worst}" if losses else "not compared"
    return [
        Check(
            f"dsgraph-3 step time over the fastest {among} ({world} ranks)",
            ratio(ours.get("step_s"), [by_name[peer]["step_s"] for peer in peers]),
            0.80,
            "lower",
        ),
        Check(
            f"dsgraph-3 peak memory a rank over the smallest {among} ({world} ranks)",
            ratio(ours.get("peak_mb"), [by_name[peer]["peak_mb"] for peer in peers]),
            0.90,
            "lower",
        ),
        Check(
            "dsgraph-3 compile time over plain torch.compile on one rank",
            ratio(compile_seconds(ours), [compile_seconds(by_name.get("single-compile", {}))]),
            1.3,
            "lower",
        ),
        Check(
            f"loss after {LOSS_STEP} steps, dsgraph against one process with everything ({of_losses})",
            losses[worst] if worst is not None else None,
            1e-5,
            "lower",
        ),
    ]


def compile_seconds(row: Row) -> float | None:
    """Return how much longer the first step took than others do, seconds; None when the row lacks one of the two."""
    first, step = row.get("first_step_s"), row.get("step_s")
    return None if first is None or step is None else first - step


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with step time and peak memory over those of the best peer of the same memory class."""
    table = []
    for row in rows:
        memory = SYSTEMS[row["system"]].memory
        peers = [
            peer
            for peer in rows
            if memory is not None and SYSTEMS[peer["system"]].is_peer and SYSTEMS[peer["system"]].memory == memory
        ]
        columns: Row = {}
        for name, value in row.items():
            columns[name] = value
            if name in ("step_s", "peak_mb"):
                columns[f"{name.partition('_')[0]}/peer"] = ratio(value, [peer[name] for peer in peers])
        table.append(columns)
    return table


def _loss_differences(by_name: Mapping[str, Row]) -> dict[str, float]:
    """Return differences to one process that runs the same kernels.

    Inductor's kernels round in other places than eager's: one process against itself, compiled and not, is 1e-4 apart
    after 20 steps of AdamW. That is no matter of ranks.
    """
    found = {}
    for name, row in by_name.items():
        alone = "single" if name.endswith("-eager") else "single-compile"
        if name.startswith("dsgraph-") and alone in by_name:
            found[name] = abs(row["loss"] - by_name[alone]["loss"])
    return found


def _print_compile_times(rows: Sequence[Row]) -> None:
    names = ("single-compile", "single-compile-each", "fsdp2-compile", "dsgraph-3")
    seconds = {row["system"]: compile_seconds(row) for row in rows if row["system"] in names}
    if seconds:
        print("compile time, s: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    default = Workload()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero", description="ZeRO side by side.")
    add_arguments(parser)
    parser.add_argument("--world", type=int, default=default.world, help="number of ranks")
    parser.add_argument("--batch", type=int, default=default.batch, help="rows of a rank")
    parser.add_argument("--time", type=int, default=default.length, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=LEAST_STEPS, help=f"timed steps, {LEAST_STEPS} or more")
    parser.add_argument("--systems", help=f"comma-separated, of: {', '.join(SYSTEMS)}")
    options = parser.parse_args(arguments)
    named = options.systems.split(",") if options.systems else None
    unknown = [name for name in named or () if name not in SYSTEMS]
    if unknown:
        parser.error(f"no system called {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps is {options.steps}; the loss after {LOSS_STEP} steps needs {LEAST_STEPS} or more")
    options.systems = named or (QUICK if options.quick else list(SYSTEMS))
    return options


if __name__ == "__main__":
    sys.exit(main())

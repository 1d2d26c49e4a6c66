"""Equal blocks compiled once: seconds to the first step, and what steps cost, with blocks and without.

    python -m benchmarks.first_step --json first_step.json

Each model is a GPT of width 256 on 2 ranks, stage 3; each first step has empty caches. Columns:
    layers        blocks of the model
    system        `blocks`; `flat`: the same in one graph; `blocks-eager`, `flat-eager`: codegen "eager", which compiles
                  no kernels; `blocks-0`, `flat-0`: stage 0; `fsdp2-blocks`: FSDP2 with each block under torch.compile
    first_step_s  seconds of the first step, the slowest rank's
    warm_s        the same of a second start, which finds the caches of the first one; with --warm
    step_s        seconds a step, median over steps taken in turn
    peak_mb       most bytes of tensors alive at once on a rank in a step, in 10**6
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.comparison import WARM_UP, Comparison
from benchmarks.memory import build_counter
from benchmarks.report import Check, Report, Row, add_arguments
from benchmarks.systems import FIRST_STEP
from benchmarks.training import Workload
from examples.gpt import GPTConfig

LAYERS = (4, 24, 96)
STEPS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 when a system failed, otherwise 0, whatever the figures are."""
    options = _parse(arguments)
    report = Report()
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        counter = build_counter(Path(folder))
        for layers in options.layers:
            width, vocab, length = (32, 64, 16) if options.quick else (256, 8192, 128)
            model = GPTConfig(vocab=vocab, width=width, heads=8, layers=layers)
            workload = Workload(model, length=length)
            comparison = Comparison(workload, counter, systems=FIRST_STEP, loss_step=WARM_UP)
            try:
                for name in options.systems:
                    comparison.start(name)
                comparison.take_turns(2 if options.quick else STEPS)
                found = comparison.rows()
            finally:
                comparison.close()
                errors += comparison.errors
            for name, row in found.items():
                caches = Path(folder) / f"{layers}-{name}"
                warm = {"warm_s": _warm_start(name, workload, caches)} if options.warm else {}
                report.rows.append({"layers": layers, **row, **warm})
    report.checks = checks(report.rows)
    report.print()
    report.write(options.json)
    for error in errors:
        print(f"\nFAILED {error}", file=sys.stderr)
    return 1 if errors else 0


def _warm_start(name: str, workload: Workload, caches: Path) -> float | None:
    """Return the seconds of the first step of a system that starts for the second time; None where it failed."""
    folders = {variable: str(caches / variable) for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    system = replace(FIRST_STEP[name], environ=(*FIRST_STEP[name].environ, *folders.items()))
    row: Row = {}
    for _ in range(2):
        comparison = Comparison(workload, None, systems={name: system}, loss_step=WARM_UP)
        try:
            comparison.start(name)
            comparison.take_turns(1)
            row = comparison.rows().get(name, {})
        finally:
            comparison.close()
    return row.get("first_step_s")


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the figures to reach, from the rows that were measured."""
    found = {(row["layers"], row["system"]): row | {"compile_s": row["first_step_s"] - row["step_s"]} for row in rows}
    made = []

    def add(name: str, column: str, of: tuple[int, str], over: tuple[int, str], limit: float) -> None:
        values = [found.get(key, {}).get(column) for key in (of, over)]
        if None not in values:
            made.append(Check(name, values[0] / values[1], limit, "lower"))

    for layers, limit in ((24, 1.1), (96, 1.3)):
        for system in ("blocks", "blocks-eager"):
            name = f"{system}: first step less a step, {layers} layers over 4"
            add(name, "compile_s", (layers, system), (4, system), limit)
    add("first step, 24 layers, over FSDP2's", "first_step_s", (24, "blocks"), (24, "fsdp2-blocks"), 1.0)
    add("warm start, 96 layers over 4", "warm_s", (96, "blocks"), (4, "blocks"), 1.5)
    for ours, theirs, limit in (("blocks", "flat", 0.9), ("blocks-0", "flat-0", 1.02)):
        for layers in (4, 24):
            for what, column, most in (("step time", "step_s", limit), ("peak memory", "peak_mb", 1.03)):
                add(f"{ours}: {what}, {layers} layers, over {theirs}", column, (layers, ours), (layers, theirs), most)
    return made


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--layers", type=_numbers, default=LAYERS, help="numbers of blocks, such as 4,24")
    parser.add_argument("--systems", type=_names, default=tuple(FIRST_STEP), help=f"some of {', '.join(FIRST_STEP)}")
    parser.add_argument("--warm", action="store_true", help="also start each system a second time, with warm caches")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in FIRST_STEP]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown system {unknown[0]!r}; known: {', '.join(FIRST_STEP)}")
    return names


if __name__ == "__main__":
    sys.exit(main())

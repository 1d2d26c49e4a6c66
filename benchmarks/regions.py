"""Equal blocks compiled once: seconds to the first step, and what steps cost, with regions and without.

    python -m benchmarks.regions --json regions.json

Each model is a GPT of width 256 on 2 ranks, stage 3; each first step has empty caches. Columns:
    layers        blocks of the model
    system        `regions`; `flat`: the same without; `regions-eager`, `flat-eager`: codegen "eager", which compiles no
                  kernels; and `fsdp2-blocks`: FSDP2 with each block under torch.compile
    first_step_s  seconds of the first step, the slowest rank's
    step_s        seconds a step, median over steps taken in turn
    peak_mb       most bytes of tensors alive at once on a rank in a step, in 10**6
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.comparison import WARM_UP, Comparison
from benchmarks.memory import build_counter
from benchmarks.report import Check, Report, Row, add_arguments
from benchmarks.systems import REGIONS
from benchmarks.training import Workload
from examples.gpt import GPTConfig

LAYERS = (4, 24, 96)
STEPS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 when a system failed, otherwise 0, whatever the figures are."""
    options = _parse(arguments)
    report = Report()
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        counter = build_counter(Path(folder))
        for layers in options.layers:
            width, vocab, length = (32, 64, 16) if options.quick else (256, 8192, 128)
            model = GPTConfig(vocab=vocab, width=width, heads=8, layers=layers)
            comparison = Comparison(Workload(model, length=length), counter, systems=REGIONS, loss_step=WARM_UP)
            try:
                for name in options.systems:
                    comparison.start(name)
                comparison.take_turns(2 if options.quick else STEPS)
                report.rows += [{"layers": layers, **row} for row in comparison.rows().values()]
            finally:
                comparison.close()
                errors += comparison.errors
    report.checks = checks(report.rows)
    report.print()
    report.write(options.json)
    for error in errors:
        print(f"\nFAILED {error}", file=sys.stderr)
    return 1 if errors else 0


def checks(rows: Sequence[Row]) -> list[Check]:
    """The figures to reach, from the rows that were measured."""
    found = {(row["layers"], row["system"]): row for row in rows}
    made = []

    def add(name: str, column: str, of: tuple[int, str], over: tuple[int, str], limit: float) -> None:
        if of in found and over in found and None not in (found[of][column], found[over][column]):
            made.append(Check(name, found[of][column] / found[over][column], limit, "lower"))

    for layers, limit in ((24, 1.3), (96, 2.0)):
        for system in ("regions", "regions-eager"):
            name = f"{system}: first step, {layers} layers over 4"
            add(name, "first_step_s", (layers, system), (4, system), limit)
    add("first step, 24 layers, over FSDP2's", "first_step_s", (24, "regions"), (24, "fsdp2-blocks"), 1.2)
    for layers in (4, 24):
        for column in ("step_s", "peak_mb"):
            add(f"{column}, {layers} layers, over flat", column, (layers, "regions"), (layers, "flat"), 1.02)
    return made


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regions", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--layers", type=_numbers, default=LAYERS, help="numbers of blocks, such as 4,24")
    parser.add_argument("--systems", type=_names, default=tuple(REGIONS), help=f"some of {', '.join(REGIONS)}")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in REGIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown system {unknown[0]!r}; known: {', '.join(REGIONS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())

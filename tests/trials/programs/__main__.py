"""`python -m tests.trials.programs --count 1000 --seed 0`: a table of how they ended, and each that failed."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from pathlib import Path

from tests.trials.programs.judge import FAULTS, OUTCOMES, Verdict
from tests.trials.programs.processes import judge_all, warm_up
from tests.trials.programs.program import Program, draw
from tests.trials.table import write_table


def main() -> int:
    """Run programs; return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one")
    parser.add_argument("--only", type=int, nargs="+", help="run the programs of these seeds and say all about them")
    parser.add_argument("--jobs", type=int, default=2, help="number of programs that run at a time")
    parser.add_argument(
        "--where", default="True", help='only those for which this holds: "p.stage == 3 and not p.parts"'
    )
    parser.add_argument(
        "--page", type=Path, help="write the table between the marks of this page, tests/trials/README.md"
    )
    arguments = parser.parse_args()
    seeds = arguments.only or range(arguments.seed, arguments.seed + arguments.count)
    programs = [p for p in map(draw, seeds) if eval(arguments.where, {"p": p})]
    warm_up()
    started, counts, failed = time.monotonic(), Counter[tuple[str, str]](), []
    for program, verdict, seconds in judge_all(programs, jobs=arguments.jobs):
        for kind in (program.kind, *(f"ranks differ in: {part}" for part in program.parts or ("nothing",))):
            counts[kind, verdict.outcome] += 1
        is_fault = verdict.outcome in FAULTS
        if is_fault or arguments.only:
            failed += [program.seed] * is_fault
            print(_text(program, verdict, seconds), flush=True)
    gc.unfreeze()  # or nanobind says what is never freed
    table = _table(counts)
    print(table)
    if arguments.page:
        write_table(arguments.page, table, name="programs")
    print(f"{len(programs)} programs in {time.monotonic() - started:.0f} s, {len(failed)} failed")
    if failed:
        print(f"again: python -m tests.trials.programs --only {' '.join(map(str, sorted(failed)))}")
    return bool(failed)


def _text(program: Program, verdict: Verdict, seconds: float) -> str:
    return "\n".join(
        [f"{verdict.outcome} after {seconds:.1f} s, {program}", *(f"    {each}" for each in verdict.said), ""]
    )


def _table(counts: Counter[tuple[str, str]]) -> str:
    lines = ["| programs | " + " | ".join(OUTCOMES) + " |", "|---" * (len(OUTCOMES) + 1) + "|"]
    for kind in sorted({kind for kind, _ in counts}):
        lines.append(f"| {kind} | " + " | ".join(str(counts[kind, each] or "") for each in OUTCOMES) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""Measures the cost of comparing each run of a compiled graph: alternating steps with and without comparison.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.agreement --json agreement.json

Columns:
    stage      ZeRO stage of a GPT of 27 M parameters, codegen "inductor", 2 rows of 128 tokens a rank
    with_s     seconds a step while ranks compare, median
    without_s  seconds a step while they do not
    ratio      median over pairs of neighbouring steps of one over the other
    own_s      seconds a step, median, that comparisons take the rank which comes to them last: it waits for no other,
               so that this is what they add to a step
    own_ratio  1 + own_s / without_s, which varies less than `ratio` does: by a thousandth where steps vary by a tenth
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import Check, Report, Row, add_arguments
from benchmarks.systems import SYSTEMS
from benchmarks.training import Training, Workload
from dsgraph.ranks.eager_agreement import eager_agreements

LIMIT = 1.01
WARM_UP = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark on every rank; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--pairs", type=int, default=40, help="number of pairs of steps")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = Workload(world=dist.get_world_size())
    workload = workload.quick() if options.quick else workload
    rows = [_row(stage, workload, pairs=options.pairs) for stage in (0, 3)]
    if dist.get_rank() == 0:
        report = Report()
        report.rows = rows
        report.checks = [
            Check(f"step time with comparisons over without, stage {row['stage']}, {how}", row[key], LIMIT, "lower")
            for row in rows
            for key, how in (("ratio", "pairs of steps"), ("own_ratio", "time in comparisons"))
        ]
        report.print()
        report.write(options.json)
    dist.destroy_process_group()
    return 0


def _row(stage: int, workload: Workload, *, pairs: int) -> Row:
    training = Training(SYSTEMS[f"dsgraph-{stage}"], workload, None)
    training.timed_steps(WARM_UP)
    (agreement,) = eager_agreements.known()
    patience, seconds, inside = agreement.patience, {True: [], False: []}, list[list[float]]()
    confirm = agreement.confirm

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return confirm(*args, **kwargs)
        finally:
            inside[-1].append(time.perf_counter() - started)

    agreement.confirm = timed  # type: ignore[method-assign]
    for number in range(2 * pairs):
        compares = number % 4 in (0, 3)  # with, without, without, with: drift affects both equally
        agreement.patience = patience if compares else 0
        if compares:
            inside.append([])
        seconds[compares] += training.timed_steps(1)
    agreement.patience = patience
    of_last = torch.tensor(inside)  # [pairs, comparisons of a step]
    dist.all_reduce(of_last, dist.ReduceOp.MIN)
    own = of_last.sum(1).median().item()
    without = statistics.median(seconds[False])
    # The time of the slowest rank: a step ends with a barrier.
    ratios = [one / other for one, other in zip(seconds[True], seconds[False], strict=True)]
    return {
        "stage": stage,
        "with_s": statistics.median(seconds[True]),
        "without_s": without,
        "ratio": statistics.median(ratios),
        "own_s": own,
        "own_ratio": 1 + own / without,
    }


if __name__ == "__main__":
    raise SystemExit(main())

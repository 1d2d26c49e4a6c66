"""Measures peaks of steps under a `memory_limit`, for 20 transformers families and two convolutional networks.

    python -m benchmarks.limits_kept --json kept.json

One rank, stage 3, AdamW; the caller holds all that the model returns, as `out = model(**batch); out.loss.backward()`
does. Each model is trained without a limit, then under the least limit that the error names (share 0) and between that
and the peak without one (`--shares`). A model of several graphs accepts any limit, and the report must say so.
Columns, in 10**6 bytes:
    free_mb      most bytes of tensors alive at once in a step without a limit, counted at torch's allocator
    predicted_mb the peak that `dsgraph.report` predicts of that step
    limit_mb     `memory_limit`
    measured_mb  most bytes of tensors alive at once in a step under it
    share        measured over limit; none where it is not promised
    said         what the report says of the limit, where it does not promise it
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dsgraph
from benchmarks.limit_cases import CASES, Case
from benchmarks.memory import AllocationCounter, build_counter
from benchmarks.report import MB, Check, Report, Row, add_arguments, machine

CODEGENS = ("eager", "inductor")
QUICK = ("gpt2", "unet")
WARM_UP = 1  # steps: the first one compiles, and the optimizer makes its state
MEASURED = 1
TOO_SMALL = 1000
"""Bytes: the error says what would do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if a case failed, otherwise 0, for any measurements."""
    options = _parse(arguments)
    report = Report(machine=machine(["transformers"]))
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        library = build_counter(Path(folder))
        if library is None:
            print("no C++ compiler ($CXX, by default g++): nothing counts bytes", file=sys.stderr)
            return 1
        counter = AllocationCounter(library)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for codegen in options.codegens:
            for name in options.models:
                try:
                    for row in measure(name, codegen, counter, stage=options.stage, shares=options.shares):
                        print(
                            " ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True
                        )
                        report.rows.append(row)
                except Exception:
                    failed += 1
                    print(f"\nFAILED {name}, {codegen}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        report.checks = checks(report.rows)
        report.print()
        report.write(options.json)
        dist.destroy_process_group()
    return min(failed, 1)


def measure(
    name: str, codegen: str, counter: AllocationCounter, *, stage: int = 3, shares: Sequence[float] = (0.0, 0.5)
) -> Iterator[Row]:
    """Train one of `CASES` without a limit and under several; yield a row for each limit.

    Args:
        name: Of the case.
        codegen: Of the backend.
        counter: Counts bytes.
        stage: Of ZeRO.
        shares: Where limits are between the least one and the peak without one.
    """
    case = CASES[name]
    free, predicted, _ = _train(case, counter, stage=stage, codegen=codegen)
    least = least_limit(case, counter, stage=stage, codegen=codegen)
    for share in shares:
        limit = max(least, int(least + share * (free - least)))
        found, _, said = _train(case, counter, stage=stage, codegen=codegen, memory_limit=limit)
        yield {
            **{"model": name, "codegen": codegen, "free_mb": free / MB, "predicted_mb": predicted / MB},
            **{"limit_mb": limit / MB, "measured_mb": found / MB},
            "share": None if said else found / limit,
            "said": said,
        }
        if said:
            return


def least_limit(case: Case, counter: AllocationCounter, **options: Any) -> int:
    """Return the smallest limit under which a model can be trained, from the error of a smaller one."""
    try:
        _train(case, counter, **options, memory_limit=TOO_SMALL)
    except Exception as error:
        found = re.search(r"a step takes ([\d,]+) at least", str(error))
        if found is None:
            raise
        return int(found[1].replace(",", ""))
    return TOO_SMALL


def _train(case: Case, counter: AllocationCounter, *, stage: int, **options: Any) -> tuple[int, int, str]:
    """Return the measured and the predicted peak of a step, and the report's reasons against promising the limit."""
    torch._dynamo.reset()
    gc.collect()
    before = counter.live
    torch.manual_seed(0)
    model = dsgraph.partition(case.build().train(), stage=stage)
    compiled = torch.compile(model, backend="dsgraph", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(1)
    for step in range(WARM_UP + MEASURED):
        if step == WARM_UP:
            gc.collect()  # a compile that ended at a graph break leaves cycles, which keep the first step's outputs
            counter.reset_peak()
        out = compiled(**case.batch(generator, case.rows))
        out["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    report = dsgraph.report(compiled)
    predicted = report.memory.peak if report.memory is not None else 0
    said = " ".join(re.findall(r"memory_limit: (.*cannot be[^\n]*(?:\n +[^\n]*)*)", str(report)))
    return counter.peak - before, predicted, " ".join(said.split())


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the target metrics from the measured rows."""
    found = []
    for codegen in CODEGENS:
        own = [row for row in rows if row["codegen"] == codegen and not row["said"]]
        shares = {f"{row['model']} {row['limit_mb']:.2f}": row["share"] for row in own}
        worst = max(shares, key=lambda name: shares[name], default=None)
        value = None if worst is None else shares[worst]
        name = f"measured peak over limit, {codegen} (largest of {len(shares)}: {worst or 'none'})"
        found.append(Check(name, value, 1.0, "lower"))
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits_kept", description="Peaks under memory_limit.")
    add_arguments(parser)
    parser.add_argument("--models", help=f"comma-separated, of: {', '.join(CASES)}; default: all")
    parser.add_argument("--codegens", help=f"comma-separated, of: {', '.join(CODEGENS)}; default: all")
    parser.add_argument("--shares", default="0,0.5", help="where limits are, 0: the least, 1: the peak without one")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    options = parser.parse_args(arguments)
    options.models = options.models.split(",") if options.models else list(QUICK if options.quick else CASES)
    options.codegens = options.codegens.split(",") if options.codegens else list(CODEGENS[: 1 if options.quick else 2])
    options.shares = [float(share) for share in options.shares.split(",")]
    for given, known in ((options.models, tuple(CASES)), (options.codegens, CODEGENS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return options


if __name__ == "__main__":
    sys.exit(main())

"""How compiling grows: deeper models, more ranks; what passes cost, and what they predict of a step.

    python -m benchmarks.scaling --json scaling.json

A GPT of the width and rows of `benchmarks.zero`, stage 3, codegen "eager", compiled as one graph (`blocks="none"`), as
one rank of a group whose others do not exist. Each case runs in a process of its own, which has compiled a small model
before. Columns:
    compile_s    seconds of the first step less those of the second: Dynamo, AOTAutograd, passes, verifier
    passes_s     seconds of those in passes that touch communication
    share        of passes in compiling
    us_a_node    microseconds of passes by node of the forward and the backward
    verify_s     seconds of compiling in verifying graphs after passes
    collectives  of forward and backward
    sent_mb      bytes that a rank sends a step, in 10**6, predicted
    compute_s    seconds of computing a step, predicted
    exposed_s    seconds of a step in which computing waits for communication, predicted
    bucket_mb    the largest buffer of a collective of several parameters, in 10**6 bytes; 0 where none has several

The JSON file has the seconds of each pass as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import MB, Check, Report, Row, add_arguments, ratio
from dsgraph.tools.cli.inspect.dumps import Dump
from dsgraph.tools.cli.inspect.timeline import simulate
from dsgraph.tools.dumping.records import CollectiveRecord

LAYERS = (12, 24, 48, 96)
RANKS = (8, 64, 512, 4096)
SMALL, DEEP = 24, 96  # layers that the checks compare
MEMORY_BOUND = 25 * 2**20 / MB  # of every bucketing pass by default


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, whatever the figures are.

    Raises:
        RuntimeError: A case failed; holds what it printed.
    """
    options = _parse(arguments)
    if options.one_case:
        print(json.dumps(one_case(**json.loads(options.one_case))))
        return 0
    report = Report()
    for ranks in options.ranks:
        for layers in options.layers:
            report.rows.append(_in_a_process(layers=layers, ranks=ranks, quick=options.quick))
            last = report.rows[-1]
            print(f"{layers} layers, {ranks} ranks: {last['compile_s']:.1f} s", flush=True)
            report.checks = checks(report.rows)
            report.write(options.json)
    report.print([{name: value for name, value in row.items() if name != "passes"} for row in report.rows])
    return 0


def one_case(layers: int, ranks: int, quick: bool) -> Row:
    """Compile a GPT as one of `ranks` ranks; return its row."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    _steps(1, quick, count=1)  # what is imported, and compiled once a process, is no part of the figures
    torch._dynamo.reset()
    (first, second), report = _steps(layers, quick, count=2)
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        _steps(layers, quick, count=1, dump=Path(folder))
        predicted = _predicted(Path(folder))
    compiled = report["compiles"][0]
    seconds = sum(item["seconds"] for item in compiled["passes"] if item["name"] in communication_passes())
    forward, backward = (graph["nodes"] for graph in compiled["graphs"])
    return {
        "layers": layers,
        "ranks": ranks,
        "compile_s": first - second,
        "passes_s": seconds,
        "share": seconds / (first - second),
        "us_a_node": 1e6 * seconds / (forward + backward),
        "verify_s": compiled["verify_seconds"],
        "forward_nodes": forward,
        "backward_nodes": backward,
        "collectives": sum(item["count"] for graph in compiled["graphs"] for item in graph["traffic"]),
        "sent_mb": report["step"]["sent_bytes"] / MB,
        **predicted,
        "passes": {item["name"]: item["seconds"] for item in compiled["passes"]},
    }


def communication_passes() -> set[str]:
    """Return the names of the default passes that work on markers or collectives."""
    import dsgraph

    return {
        item.name
        for item in dsgraph.default_pipeline()
        if item.graph == "step"
        or item.changes_collectives
        or item.reorders_collectives
        or item.keeps_gathers
        or "zero-collectives" in item.requires | item.provides
    }


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the figures to reach, of the depths that were measured: medians over the numbers of ranks."""
    found = []
    share, deep, small = (
        _median(rows, "share", DEEP),
        _median(rows, "us_a_node", DEEP),
        _median(rows, "us_a_node", SMALL),
    )
    if share is not None:
        found.append(Check(f"communication passes over compile time, {DEEP} layers", share, 0.10, "lower"))
    if deep is not None and small is not None:
        what = f"communication passes, seconds per node, {DEEP} layers over {SMALL}"
        found.append(Check(what, ratio(deep, [small]), 1.5, "lower"))
    largest = max((row["bucket_mb"] for row in rows), default=0.0)
    if largest:
        found.append(Check("largest bucket over bucket_bytes", largest / MEMORY_BOUND, 1.0, "lower"))
    return found


def _median(rows: Iterable[Row], column: str, layers: int) -> float | None:
    values = [row[column] for row in rows if row["layers"] == layers]
    return statistics.median(values) if values else None


def _steps(layers: int, quick: bool, *, count: int, dump: Path | None = None) -> tuple[list[float], Row]:
    """Return the seconds of each of the first steps of a new model, and the report of it."""
    import torch

    import dsgraph
    from benchmarks.training import GPT_27M, GPT_TINY, Workload
    from examples.gpt import GPT

    workload = Workload(replace(GPT_TINY if quick else GPT_27M, layers=layers), length=16 if quick else 128)
    with torch.device("meta"):
        model = GPT(workload.model)
    dsgraph.partition(model, stage=3, blocks="none")  # one graph, whose size grows with depth
    dsgraph.materialize(model, "cpu", init="empty")
    compiled = torch.compile(
        model, backend="dsgraph", options={"codegen": "eager", **({"dump": str(dump)} if dump is not None else {})}
    )
    tokens, targets = workload.rows(0, 0)
    times = []
    for _ in range(count):
        started = time.perf_counter()
        compiled(tokens, targets).backward()
        times.append(time.perf_counter() - started)
        model.zero_grad()
    return times, dsgraph.report(model).to_dict()


def _predicted(folder: Path) -> Row:
    """Return the step predicted by the dump of a compile: forward and backward, one after the other."""
    dump = Dump(folder)
    timelines = [simulate(dump.read(dump.find(phase))) for phase in ("forward", "backward")]
    computing = (stop - start for timeline in timelines for _, start, stop in timeline.computed)
    collectives = [transfer.node.collective for timeline in timelines for transfer in timeline.transfers]
    return {
        "compute_s": sum(computing),
        "exposed_s": sum(timeline.exposed for timeline in timelines),
        "bucket_mb": max(map(_bucket_bytes, collectives), default=0.0) / MB,
    }


def _bucket_bytes(collective: CollectiveRecord | None) -> float:
    """Return the bytes of the whole buffer of a collective, as every rank has it; 0 for one of a single parameter."""
    if collective is None or len(collective.parameters) < 2 or not collective.sent:
        return 0.0
    rounds = 2 if collective.kind == "all_reduce" else 1
    return collective.sent / rounds * collective.ranks / (collective.ranks - 1)


def _in_a_process(**case: int | bool) -> Row:
    command = [sys.executable, "-m", "benchmarks.scaling", "--one-case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise RuntimeError(f"{case} failed:\n{done.stderr}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def _numbers(text: str) -> list[int]:
    found = [int(word) for word in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description="How compiling grows.")
    add_arguments(parser)
    parser.add_argument("--layers", type=_numbers, help=f"comma-separated, default {','.join(map(str, LAYERS))}")
    parser.add_argument("--ranks", type=_numbers, help=f"comma-separated, default {','.join(map(str, RANKS))}")
    parser.add_argument("--one-case", metavar="SETTINGS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.layers = options.layers or ([1, 2] if options.quick else list(LAYERS))
    options.ranks = options.ranks or ([8] if options.quick else list(RANKS))
    return options


if __name__ == "__main__":
    sys.exit(main())

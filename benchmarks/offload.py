"""The cost of training a model with parameters, gradients and optimizer state on disk.

    python -m benchmarks.offload --json FILE [--quick] [--folder FOLDER]
    python -m benchmarks.offload --part billion --json FILE
    python -m benchmarks.offload --part model --json FILE

One rank, stage 3, codegen "eager", checkpointed blocks, AdamW, 2,048 tokens a step. Columns:

    case        `disk`: all on disk, activations between blocks as well, the optimizer's step beside the backward;
                `disk-after`: the step after the backward; `memory`: the same training in memory
    states_mb   16 bytes a parameter
    grown_mb    peak of the process's memory over what it took before the model was made
    ready_s     seconds until the parameters are initialised
    first_s     seconds from the start to the end of the first step
    step_s      median of the later steps
    bound_s     of those on disk: the larger of the step in memory, and the bytes of a step at the rate of the disk
    moved_mb    MB of parameters, gradients and state that a step reads and writes: 24 and 16 bytes a parameter
    read, write the rates of the disk, MB a second, of reads and writes of 32 MiB without the page cache

The cases run one after the other, each in a process of its own. `deepspeed-host`, `deepspeed-disk`, `dsgraph-host` and
`dsgraph-disk` are DeepSpeed's own offload beside ours, of 32 million parameters and 512 tokens (`offload_peer.py`):
parameters, gradients and state; `error` is the error of one that failed or exceeded its time limit. The part `billion`
is one step of 1.02 billion parameters, all on disk, on 512 tokens; `loading_mb` is the growth of memory until they are
initialised.

The part `model` compares the memory that `dsgraph.report` predicts for a step with the measured one, on each tier,
without activations on disk: with the optimizer's step after the backward and during it, and several ratios. Memory is
what torch's allocator and the pools of buffers have at most; disk is the files; `grown_mb` is the growth of the whole
process, its first step included, which compiles. The last row is of 2 ranks, stage 3, with a tenth of parameters and of
state on disk (`ratio`): parameters after some steps of a small model against those of one process in memory.
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
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import optim

import dsgraph
from benchmarks.memory import process_bytes
from benchmarks.offload_model import ENVIRONMENT, against_the_model
from benchmarks.offload_peer import CASES, peer_rows, run_case
from benchmarks.report import MB, Check, Report, Row, add_arguments, machine
from dsgraph.offload.slots import SlotFile
from dsgraph.optim.disk_optimizer import DiskOptimizer
from examples.gpt import GPT
from examples.ranks import Place
from examples.text import standard_library
from examples.train_larger_than_memory import build

READ, WRITTEN = (
    24,
    16,
)  # bytes a parameter: read by forward, backward and step (4 numbers); gradient and step (3 numbers)
STEPS = 4
ON_DISK = ("disk", "disk-after")
SIZES = {"full": {"width": 1024, "layers": 32}, "quick": {"width": 128, "layers": 2}}
BILLION = {"full": {"width": 1536, "layers": 36}, "quick": SIZES["quick"]}
GIB = 2**30


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description="Training from disk.")
    add_arguments(parser)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk")
    parser.add_argument("--part", choices=("usual", "billion", "model"), default="usual", help="see above")
    parser.add_argument(
        "--case",
        choices=("memory", *ON_DISK, "billion", *CASES),
        help="runs one case in this process, for the benchmark",
    )
    options = parser.parse_args(arguments)
    if options.case in CASES:
        print(json.dumps(run_case(options.case, options.folder, quick=options.quick)))
        return 0
    if options.case:
        sizes = (BILLION if options.case == "billion" else SIZES)["quick" if options.quick else "full"]
        print(json.dumps(_case(options.case, options.folder, sizes)))
        return 0
    report = Report(machine=machine(["deepspeed"]))
    if options.part == "model":
        report.rows, report.checks = against_the_model(options.folder, quick=options.quick)
        report.print()
        report.write(options.json)
        return 0
    if options.part == "billion":
        billion = _apart("billion", options)
        report.rows = [billion]
        report.checks = [Check("memory of 1 billion parameters, GiB", billion["peak_mb"] * MB / GIB, 3, "lower")]
        report.print()
        report.write(options.json)
        return 0
    rates = _rates(options.folder)
    memory, *on_disk = (_apart(case, options) for case in ("memory", *ON_DISK))
    count = memory["states_mb"] * MB / 16
    transfer = count * (READ / rates["read"] + WRITTEN / rates["write"]) / MB
    bound = max(memory["step_s"], transfer)
    for row in on_disk:
        row |= {"bound_s": bound, "moved_mb": (READ + WRITTEN) * count / MB, **rates}
        case = row["case"]
        report.checks += [
            Check(f"{case}: model states over the growth of memory", row["states_mb"] / row["grown_mb"], 10, "higher"),
            Check(f"{case}: step over the larger of computing and the disk", row["step_s"] / bound, 1.3, "lower"),
            Check(f"{case}: difference of the last losses", abs(row["loss"] - memory["loss"]), 0, "lower"),
        ]
    report.rows = [memory, *on_disk, *peer_rows(options.folder, quick=options.quick)]
    report.print()
    report.write(options.json)
    return 0


def _apart(case: str, options: argparse.Namespace) -> Row:
    command = [sys.executable, "-m", "benchmarks.offload", "--case", case, "--folder", options.folder]
    quick = ["--quick"] if options.quick else []
    environ = {**os.environ, **ENVIRONMENT}
    done = subprocess.run([*command, *quick], stdout=subprocess.PIPE, text=True, env=environ, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _case(case: str, folder: str, sizes: dict[str, int]) -> dict[str, Any]:
    Place.join(alone=True)
    text = standard_library()
    before, started = process_bytes("VmRSS"), time.perf_counter()
    torch.manual_seed(0)
    model: GPT = build(**sizes, folder=None if case == "memory" else folder)
    ready, loading = time.perf_counter() - started, process_bytes("VmHWM") - before
    optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"codegen": "eager"}
    if case != "memory":
        optimizer = dsgraph.offload_optimizer(optimizer, model)
        options["activation_offload"] = "disk"
    compiled = torch.compile(model, backend="dsgraph", options=options)
    seconds, first, loss = [], 0.0, 0.0
    for step in range(1 if case == "billion" else STEPS):
        begun = time.perf_counter()
        found = compiled(*text.batch(step, size=2 if case == "billion" else 8, time=256, seed=0, rank=0, world=1))
        with _around_backward(optimizer, case):
            found.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
        loss = found.item()
        first = first or time.perf_counter() - started
    grown = process_bytes("VmHWM") - before
    count = sum(param.numel() for param in model.parameters())
    if case == "billion":
        states = {
            "case": case,
            "states_mb": 16 * count / MB,
            "peak_mb": process_bytes("VmHWM") / MB,
            "loading_mb": loading / MB,
        }
        return {**states, "ready_s": ready, "first_s": first, "loss": loss}
    return {
        **{"case": case, "states_mb": 16 * count / MB, "grown_mb": grown / MB, "ready_s": ready, "first_s": first},
        **{"step_s": statistics.median(seconds[1:]), "loss": loss},
    }


def _around_backward(optimizer: optim.Optimizer, case: str) -> AbstractContextManager[None]:
    if isinstance(optimizer, DiskOptimizer) and case != "disk-after":
        return optimizer.beside_backward()
    return nullcontext()


def _rates(folder: str) -> dict[str, float]:
    """Return the rates of the disk, MB a second, with two threads, as many as read and write parameters."""
    size, count = 32 * 2**20, 32
    file = SlotFile([size] * count, below=Path(folder), name="rates")
    found = {}
    for name in ("write", "read"):
        begun = time.perf_counter()
        if name == "write":
            waiting = [file.write(slot, file.take(slot)) for slot in range(count)]
            for future in waiting:
                future.result()
        else:
            for reading in [file.read(slot) for slot in range(count)]:
                file.give_back(reading.result())
        found[name] = size * count / (time.perf_counter() - begun) / MB
    return found


if __name__ == "__main__":
    sys.exit(main())

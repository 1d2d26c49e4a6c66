"""The cost of dumping and verifying while a deep GPT compiles, and of reading its dump with the command line.

    python -m benchmarks.dumps --json out.json

Each compile runs in a process of its own, as one rank of a group whose other rank does not exist, without and with a
dump in turn. Columns:
    compile_s  seconds from the first call to the end of the first backward, median
    dump_s     seconds of those in writing the dump, median
    verify_s   seconds of those in verifying graphs after passes, median
The commands then read the dump of two ranks; `seconds` is the whole process, median.
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
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Check, Report, Row, add_arguments, ratio

COMMANDS = {
    "ls": ["ls"],
    "show": ["show", "joint"],
    "diff of two passes": ["diff", "joint-2", "joint-3"],
    "diff of two ranks": ["diff", "rank0/backward", "rank1/backward"],
    "explain": ["explain", "mm_1"],
    "collectives": ["collectives"],
    "memory": ["memory"],
    "ranks": ["ranks"],
    "dot": ["dot", "forward"],
}
CHECKED = ("ls", "show", "diff of two passes", "diff of two ranks")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 when a command failed, otherwise 0, whatever the figures are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--codegen", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--repeat", type=int, default=3, help="pairs of compiles, and runs of each command")
    parser.add_argument("--compile-one", metavar="SETTINGS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.compile_one:
        print(json.dumps(compile_one(**json.loads(options.compile_one))))
        return 0
    layers, repeat = (2, 1) if options.quick else (options.layers, options.repeat)
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "dump"
        pairs = [
            (_compile(layers, options.codegen, None, rank=0), _compile(layers, options.codegen, dump, rank=0))
            for _ in range(repeat)
        ]
        _compile(layers, options.codegen, dump, rank=1)
        plain, dumped = (statistics.median(pair[side]["compile_s"] for pair in pairs) for side in (0, 1))
        dump_s, verify_s = (statistics.median(pair[1][name] for pair in pairs) for name in ("dump_s", "verify_s"))
        files = [path for path in dump.rglob("*") if path.is_file()]
        what = f"{options.codegen}, {layers} layers"
        report.rows = [
            {"what": f"compile, {what}", "compile_s": plain, "dump_s": 0.0, "verify_s": verify_s, "dump_mb": 0.0},
            {
                "what": f"compile and dump, {what}",
                "compile_s": dumped,
                "dump_s": dump_s,
                "verify_s": verify_s,
                "dump_mb": sum(path.stat().st_size for path in files) / 2e6,
            },
        ]
        seconds = {name: _command(dump, command, repeat) for name, command in COMMANDS.items()}
    report.checks = [
        Check("compile time with a dump over without, minus 1", dumped / plain - 1, 0.10, "lower"),
        Check("time spent dumping, over compile time without a dump", ratio(dump_s, [plain]), 0.10, "lower"),
        Check("time spent verifying, over compile time", ratio(verify_s, [plain]), 0.05, "lower"),
        *(Check(f"{name}, seconds", seconds[name], 2.0, "lower") for name in CHECKED),
    ]
    columns = [*report.rows]
    report.rows = [*report.rows, *({"what": name, "seconds": value} for name, value in seconds.items())]
    report.print(columns)
    print("\n".join(f"{name:<20} {value:.2f} s" for name, value in seconds.items()))
    report.write(options.json)
    return 0


def compile_one(layers: int, codegen: str, folder: str | None, rank: int) -> Row:
    """Compile a GPT as one of two ranks; return what it took."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import dsgraph
    from examples.gpt import GPT, GPTConfig

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    model = GPT(GPTConfig(width=64, layers=layers))
    dsgraph.partition(model, stage=3, blocks="none", keep_whole_below=1000)  # one graph, whose size grows with depth
    options = {"codegen": codegen} if folder is None else {"codegen": codegen, "dump": folder}
    compiled = torch.compile(model, backend="dsgraph", options=options)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    started = time.perf_counter()
    compiled(tokens, tokens).backward()
    seconds = time.perf_counter() - started
    passes = [item for part in dsgraph.report(model).to_dict()["compiles"] for item in part["passes"]]
    return {
        "compile_s": seconds,
        "dump_s": 0.0 if folder is None else _dump_seconds(Path(folder), rank),
        "verify_s": sum(item["verify_seconds"] or 0.0 for item in passes),
    }


def _dump_seconds(folder: Path, rank: int) -> float:
    manifest = json.loads((folder / f"rank{rank}" / "compile1" / "compile.json").read_text())
    return sum(step.get("dump_seconds", 0.0) for step in manifest["steps"])


def _compile(layers: int, codegen: str, folder: Path | None, *, rank: int) -> Row:
    settings = {"layers": layers, "codegen": codegen, "folder": folder and str(folder), "rank": rank}
    command = [sys.executable, "-m", "benchmarks.dumps", "--compile-one", json.dumps(settings)]
    with tempfile.TemporaryDirectory() as cache:
        environ = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env={**_environ(), **environ})
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def _command(dump: Path, command: list[str], repeat: int) -> float:
    name, *rest = command
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        line = [sys.executable, "-m", "dsgraph", name, str(dump), *rest]
        done = subprocess.run(line, capture_output=True, text=True, env=_environ())
        times.append(time.perf_counter() - started)
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stderr)
    return statistics.median(times)


def _environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())

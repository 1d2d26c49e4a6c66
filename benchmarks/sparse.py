"""Block-sparse attention beside torch's dense attention on a CPU: time, memory, longest sequence, held-out loss.

    python -m benchmarks.sparse --json sparse.json --plot sparse.svg

One attention of BERT-base's shape, 12 heads of width 64, one sequence, float32. Systems take turns; times are medians.
Columns:
    system      `dense`: torch's scaled_dot_product_attention; `fixed`, `bslongformer`: layouts of `sparse_cases.py`
    length      tokens
    density     share of the scores that are computed
    forward_s   seconds
    backward_s  seconds
    speed-up    of forward and backward over `dense`, the median of turns
    of ideal    the speed-up times the density
    peak_mb     memory that a new process takes for it, inputs and all, in 10**6 bytes; at the longest length
    longest     tokens of a sequence, of those tried, of which forward and backward take no more than 4 GiB
    loss        held-out loss of a small BERT on masked bytes, two ranks, stage 2 (`examples/long_bert.py`), in nats

`--part` measures one part alone, and keeps the rows of the other one that the file of `--json` has.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.report import Check, Report, Row, add_arguments, ratio
from benchmarks.sparse_cases import LAYOUTS, density_of, inputs, peak_bytes, seconds
from dsgraph.tools.cli.inspect import plots

LENGTHS = (2048, 4096, 8192, 16_384)
TURNS = 2
SYSTEMS = ("dense", *LAYOUTS)
LIMIT = 4 << 30  # bytes, for the longest sequence
EAGER_LENGTHS = (2048, 3072, 4096, 5120)
LONG_LENGTHS = (65_536, 98_304, 131_072)
THREADS = 1  # each system has one core
ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 whatever the figures are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draws seconds over length")
    parser.add_argument("--part", choices=("speed", "losses"), help="measures this part alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    report, lengths = Report(), (512, 1024) if options.quick else LENGTHS
    kept = kept_rows(options.json) if options.part else []
    if options.part != "losses":
        report.rows += speed(lengths, quick=options.quick)
    else:
        report.rows += [row for row in kept if "loss" not in row]
    if options.part == "speed":
        report.rows += [row for row in kept if "loss" in row]
    elif not options.quick:
        report.rows += [held_out(mode) for mode in ("dense", *LAYOUTS)]
    report.checks = checks(report.rows, lengths[-1])
    report.print()
    report.write(options.json)
    if options.plot is not None:
        draw(report.rows, options.plot)
    return 0


def kept_rows(path: Path | None) -> list[Row]:
    """Return the rows of an earlier run."""
    if path is None or not path.exists():
        return []
    found: list[Row] = json.loads(path.read_text())["rows"]
    return found


def speed(lengths: Sequence[int], *, quick: bool) -> list[Row]:
    """Return seconds at each length, memory at the last, and the longest sequences."""
    rows = [row for length in lengths for row in timed(length, 1 if quick else TURNS)]
    for row in rows:
        if row["length"] == lengths[-1]:
            found = peak_bytes(row["system"], lengths[-1])
            row["peak_mb"] = None if found is None else found / 1e6
    return rows if quick else [*rows, longest("eager", EAGER_LENGTHS), longest("bslongformer", LONG_LENGTHS)]


def timed(length: int, turns: int) -> list[Row]:
    """Return a row for each system, from turns that they take one after the other."""
    given = inputs(length)
    for system in LAYOUTS:
        seconds(system, given)  # plans its blocks
    found: dict[str, list[tuple[float, float]]] = {system: [] for system in SYSTEMS}
    for _ in range(turns):
        for system in SYSTEMS:
            found[system].append(seconds(system, given))
    rows = []
    for system in SYSTEMS:
        pairs = zip(found["dense"], found[system], strict=True)
        faster = statistics.median(sum(dense) / sum(own) for dense, own in pairs)
        density = density_of(system, length)
        rows.append(
            {
                "system": system,
                "length": length,
                "density": density,
                "forward_s": statistics.median(forward for forward, _ in found[system]),
                "backward_s": statistics.median(backward for _, backward in found[system]),
                "speed-up": faster,
                "of ideal": faster * density,
            }
        )
    return rows


def longest(system: str, lengths: Sequence[int]) -> Row:
    """Return the longest of some lengths at which a forward and a backward fit into LIMIT."""
    fitting = None
    for length in lengths:
        found = peak_bytes(system, length)
        if found is None or found > LIMIT:
            break
        fitting = length
    return {"system": system, "longest": fitting}


def held_out(mode: str) -> Row:
    """Return the loss of the example with a layout, at a length at which dense attention is quick as well."""
    script = ["-m", "examples.long_bert", "--mode", mode, *("--length", "512", "--batch", "4")]
    script += ["--short-steps", "400", "--steps", "150"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    done = subprocess.run([*command, "--evaluations", "8"], cwd=ROOT, capture_output=True, text=True, check=False)
    said = re.search(r"held-out loss ([\d.]+)", done.stdout)
    if said is None:
        print(f"FAILED {mode}: {done.stderr[-2000:]}", file=sys.stderr)
    return {"system": mode, "loss": float(said.group(1)) if said else None}


def checks(rows: Sequence[Row], length: int) -> list[Check]:
    """Return the figures to reach, from the rows that were measured."""
    found = {row["system"]: row for row in rows if row.get("length") == length}
    losses = {row["system"]: row["loss"] for row in rows if "loss" in row}
    reach = {row["system"]: row["longest"] for row in rows if "longest" in row}
    made = []
    for system in LAYOUTS:
        own = found.get(system, {})
        made += [
            Check(
                f"{system}: times faster than dense attention at {length:,} tokens", own.get("speed-up"), 6, "higher"
            ),
            Check(f"{system}: share of the ideal speed-up, 1 / density", own.get("of ideal"), 0.6, "higher"),
            Check(
                f"{system}: memory over dense attention's",
                ratio(own.get("peak_mb"), [found.get("dense", {}).get("peak_mb")]),
                1.2,
                "lower",
            ),
            Check(
                f"{system}: held-out loss over dense", ratio(losses.get(system), [losses.get("dense")]), 1.02, "lower"
            ),
        ]
    times = ratio(reach.get("bslongformer"), [reach.get("eager")])
    return [*made, Check("longest sequence in 4 GiB over dense eager attention's", times, 10, "higher")]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Seconds of forward and backward over length, a line a system."""
    figure, axes = plots.new_figure(rows=1, height=4.0)
    for system in SYSTEMS:
        own = [row for row in rows if row["system"] == system and "length" in row]
        axes[0].plot(
            [row["length"] for row in own], [row["forward_s"] + row["backward_s"] for row in own], "o-", label=system
        )
    axes[0].set(xscale="log", yscale="log", xlabel="tokens", ylabel="forward and backward, s")
    axes[0].set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
    axes[0].minorticks_off()
    axes[0].legend()
    plots.save(figure, path)


if __name__ == "__main__":
    sys.exit(main())

"""`dsgraph calibrate`: measures this machine, for the cost model."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dsgraph.compiler.costs.calibration_record import CalibrationRecord, from_text, merge, to_text
from dsgraph.compiler.costs.store import CalibrationError, load, save
from dsgraph.launch.processes import describe_exit
from dsgraph.launch.script import Script, rank_count, run_script
from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.cli.table import table

_SECONDS = 25.0
_RANKS = 2

_DESCRIPTION = """\
Measure how fast this machine multiplies matrices, copies memory and starts kernels, how fast NVIDIA GPUs exchange
pinned memory with the host, the latency and bandwidth of each kind of collective, and how much longer computation takes
beside it: with gloo over --nproc ranks, and with the GPUs' backend over all GPUs if there are several.
The results are written to dsgraph/calibration in the user's cache folder (XDG_CACHE_HOME or ~/.cache), one file per
host and device. Earlier results for groups of other sizes are kept. Compiling uses the results of the first rank's host
on all ranks, or defaults if there are none. To train across hosts, run `torchrun ... -m dsgraph calibrate` on all of
them: it measures over the ranks that torchrun started, and the first rank writes. Run nothing else during the
measurement.
Exit code 1: measuring failed, or the results could not be written."""


def calibrate(arguments: argparse.Namespace) -> Answer:
    """Measure, write and show."""
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # set by torchrun
    if is_rank and arguments.nproc is not None:
        raise CommandError("--nproc sets how many ranks to start, but torchrun has already started them: leave it out")
    try:
        records = _over_these_ranks(arguments) if is_rank else _over_new_ranks(arguments)
        if is_rank and os.environ["RANK"] != "0":
            return Answer("", None)
        written = [_write(record) for record in records]
    except (RuntimeError, CalibrationError) as error:  # torch's errors of process groups are RuntimeErrors
        return Answer(f"measuring failed: {error}", {"problem": str(error)}, code=1)
    text = "\n\n".join(_describe(record, path) for record, path in written)
    return Answer(text, [{"path": str(path), "calibration": json.loads(to_text(record))} for record, path in written])


def _over_these_ranks(arguments: argparse.Namespace) -> list[CalibrationRecord]:
    from dsgraph.tools.calibration.measure_ranks import measure_ranks
    from dsgraph.tools.calibration.worker import process_group

    with process_group():
        return measure_ranks(seconds=arguments.seconds)


def _over_new_ranks(arguments: argparse.Namespace) -> list[CalibrationRecord]:
    """Start ranks for the CPU, then, where there are GPUs, one for each of them.

    Raises:
        CalibrationError: They failed; they have written why.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    runs = [("cpu", arguments.nproc or _RANKS)]
    if accelerator is not None:
        runs.append((accelerator.type, torch.accelerator.device_count()))
    records: list[CalibrationRecord] = []
    for device_type, nproc in runs:
        seconds = arguments.seconds / len(runs)
        print(f"measuring {device_type} on {nproc} ranks, about {10 + seconds:.0f} s", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="dsgraph-calibrate-") as folder:
            file = Path(folder) / "calibrations"
            worker = Script(("-m", "dsgraph.tools.calibration.worker"))
            code = run_script(
                worker, [str(file), str(seconds), device_type], nproc=nproc, environment={}, quiet=arguments.json
            )
            if code != 0:
                raise CalibrationError(f"the ranks for {device_type} ended with {describe_exit(code)}")
            records += map(from_text, file.read_text(encoding="utf-8").splitlines())
    return records


def _write(record: CalibrationRecord) -> tuple[CalibrationRecord, Path]:
    """Write a calibration, and keep those entries of an older one that were not measured again.

    Raises:
        CalibrationError: It cannot be written.
    """
    try:
        older = load(record.host, record.device)
    except CalibrationError as error:
        print(f"dsgraph: replaced: {error}", file=sys.stderr)
        older = None
    record = merge(record, older)
    return record, save(record)


def _describe(record: CalibrationRecord, path: Path) -> str:
    threads = f", {record.threads} thread{'s' * (record.threads > 1)} a rank" if record.threads else ""
    rows = [[f"matrix product, {dtype}", f"{rate / 1e9:.4g} GFLOP/s"] for dtype, rate in record.flops_per_s.items()]
    rows.append(["copy, read and written", f"{record.bytes_per_s / 1e9:.4g} GB/s"])
    rows.append(["smallest kernel", f"{1e6 * record.kernel_s:.3g} us"])
    rows += [
        [f"{tier.tier}, pinned, each way", f"{tier.bytes_per_s / 1e9:.4g} GB/s after {1e6 * tier.latency_s:.3g} us"]
        for tier in record.tiers
    ]
    parts = [f"{record.device} of {record.host} ({record.device_type}{threads})", table(rows, ["device", ""])]
    if record.links:
        headers = ["collective", "backend", "ranks", "hosts", "latency us", "MB/s sent", "fit off by", "delay"]
        parts.append(table(_link_rows(record), headers, right=(2, 3, 4, 5, 6, 7)))
    return "\n".join([*parts, f"written to {path}"])


def _link_rows(record: CalibrationRecord) -> Sequence[Sequence[str]]:
    return [
        [
            *(link.kind, link.backend, str(link.ranks), str(link.hosts)),
            *(f"{1e6 * link.latency_s:.4g}", f"{link.bytes_per_s / 1e6:.4g}", f"{100 * link.error:.0f} %"),
            f"{100 * link.delay:.0f} %",
        ]
        for link in record.links
    ]


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"is {text!r}; it takes a number of seconds, above 0 and up to 3600")
    return value


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=rank_count, metavar="N", help=f"ranks to start for gloo (default: {_RANKS})")
    parser.add_argument(
        "--seconds",
        type=_duration,
        default=_SECONDS,
        metavar="S",
        help=f"time for the collectives; devices and startup take about 15 s more (default: {_SECONDS:.0f})",
    )


COMMAND = Command("calibrate", "measure this machine for the cost model", _DESCRIPTION, _configure, calibrate)

"""ZeRO over a slow link: the systems of `benchmarks.zero` on two hosts, joined by a link of a set rate.

    python -m benchmarks.links --rates 1gbit --json links.json

Linux and root: the hosts are network namespaces, see `benchmarks.namespaces`. Each has one rank on one core. Columns
besides those of `benchmarks.zero`, of which `loss` is that of the last step:
    rate        of each direction of the link, frames' headers included
    bound_s     seconds below which no step can be: the longer of computing and sending `theory_mb` at the rate
    step/bound  the step's time over it
    theory_mb   what a rank must send a step by the ZeRO stage's definition: in stage 3, half of its parameters 3 times
    link_mb     what it did send: bytes that left its host in a step, most headers of TCP not counted
    link_mbit   what the link gives gloo, Mbit/s, both directions at once; headers take 4.4 % of the rate

dsgraph is calibrated first at every rate, as `dsgraph calibrate` does it, on the two hosts: its passes know the link.

`compute` is one rank alone with its own rows: forward, backward and its part of the optimizer, compiled by Inductor,
and nothing sent. Systems called `-x4` run four micro-batches a step. Their gradients meet as late as the system can:
DDP's in `no_sync`, dsgraph's in `accumulate`, `-once` with `reduce_once`; `compute-x4` is their reference.
`dsgraph-3-spare` has the memory that DeepSpeed's stage 3 takes (477 MB) as its `memory_limit`, and so has
`dsgraph-3-spare-x4`: it holds what it gathers from the first micro-batch to the last.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.comparison import WARM_UP, Comparison
from benchmarks.link_figures import RANKS, bound_seconds, checks, heats, theory_bytes
from benchmarks.memory import build_counter
from benchmarks.namespaces import LinkError, Placement, interface_bytes, linked_hosts, parse_rate, require_hosts
from benchmarks.report import MB, Report, Row, add_arguments, machine, ratio, table
from benchmarks.systems import ACCUMULATING, FIRST_STEP, SYSTEMS, System, compute_name, compute_systems, installed
from benchmarks.training import Training, Workload
from benchmarks.workers import Workers
from dsgraph.compiler.costs.store import save
from dsgraph.launch.processes import ended_by_signals
from dsgraph.tools.calibration.measure_ranks import measure_ranks

RATES = ("100mbit", "1gbit", "10gbit", "unlimited")
STEPS = 8
PROBES = 5
CALIBRATION_SECONDS = 20.0
PROBE_BYTES = 25 * MB  # a burst of the token bucket is 0.5 % of it

DEFAULT = (
    *("ddp", "fsdp2", "fsdp2-compile", "fsdp2-split", "deepspeed-3", "dsgraph-3", "dsgraph-3-spare"),
    *("ddp-x4", "dsgraph-2-x4", "dsgraph-2-once-x4"),
)
QUICK = ("ddp", "dsgraph-3-eager", "dsgraph-2-x4-eager")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code.

    Returns:
        0, whatever the figures are; 1 when a system failed; 2 when two hosts cannot be made here.
    """
    options = _parse(arguments)
    workload = Workload(world=RANKS).quick() if options.quick else Workload(world=RANKS)
    systems = {**SYSTEMS, **ACCUMULATING, **FIRST_STEP, **compute_systems(RANKS, compiled=not options.quick)}
    names = installed(options.systems, systems)
    report = Report(machine=machine(["deepspeed"]))
    try:
        require_hosts()
        with tempfile.TemporaryDirectory() as folder, ended_by_signals():
            run = LinkRun(workload, systems, build_counter(Path(folder)), options.steps)
            for rate in options.rates:
                rows = run.measure(rate, names)
                report.rows += rows
                report.checks = checks(report.rows)
                report.write(options.json)  # a run may take an hour: what ends it does not lose the rates before
                print(table(rows), flush=True)
    except LinkError as error:
        print(f"benchmarks.links: {error}", file=sys.stderr)
        return 2
    report.print()
    for text in run.errors:
        print(f"\nFAILED {text}", file=sys.stderr)
    return 1 if run.errors else 0


class LinkTraining(Training):
    """Training on a host of a link."""

    def link_bytes(self) -> int:
        """Return the bytes that leave this host in the next step, and in the two barriers around it."""
        before = interface_bytes()
        self.timed_steps(1)
        return interface_bytes() - before


class LinkComparison(Comparison):
    """Systems on the two hosts of a link."""

    def warm_up(self, group: Workers) -> Row:
        """Return the columns of what needs no turns, and what leaves a host."""
        return {**super().warm_up(group), "link_mb": max(group.call("link_bytes")) / MB}


class LinkProbe:
    """The bandwidth of the link for gloo."""

    def megabits(self) -> float:
        """Return Mbit/s of each direction while both ranks send to each other, median."""
        give, take = torch.zeros(PROBE_BYTES, dtype=torch.uint8), torch.zeros(PROBE_BYTES, dtype=torch.uint8)
        other = 1 - dist.get_rank()
        rates = []
        for _ in range(PROBES):
            dist.barrier()
            started = time.perf_counter()
            # In this order: with the send first, and in most of gloo's collectives, one direction follows the other.
            works = [dist.irecv(take, other), dist.isend(give, other)]
            for work in works:
                assert work is not None
                work.wait()
            rates.append(8 * PROBE_BYTES / (time.perf_counter() - started) / 10**6)
        return statistics.median(rates)


class Calibrator:
    """`dsgraph calibrate` on the two hosts, which have one name and so one file."""

    def calibrate(self) -> None:
        """Measure; the first rank writes."""
        records = measure_ranks(["cpu"], seconds=CALIBRATION_SECONDS)
        if dist.get_rank() == 0:
            for record in records:
                save(record)


class LinkRun:
    """All systems, at one rate after the other."""

    def __init__(self, workload: Workload, systems: Mapping[str, System], counter: Path | None, steps: int) -> None:
        self._workload = workload
        self._systems = systems
        self._counter = counter
        self._steps = steps
        self._parameter_bytes = sum(param.nbytes for param in workload.build().parameters())
        self.errors: list[str] = []

    def measure(self, rate: str, names: Sequence[str]) -> list[Row]:
        """Return the rows of a rate: all systems anew, since what a compiler decides may depend on the link."""
        found: dict[str, Row] = {}
        print(f"link: {rate}", flush=True)
        with linked_hosts(parse_rate(rate)) as hosts, cache_folder():
            place = Placement(hosts)
            with Workers("calibrate", Calibrator, world=RANKS, place=place) as calibrators:
                calibrators.call("calibrate")
            with Workers("link", LinkProbe, world=RANKS, place=place) as probe:
                given = probe.call("megabits")
                for heat in heats(names, self._systems):
                    found |= self._measure(heat, place)
                given += probe.call("megabits")
        return [self._with_bound(found, name, rate=rate, megabits=statistics.median(given)) for name in found]

    def _measure(self, heat: Sequence[str], place: Placement) -> dict[str, Row]:
        comparison = LinkComparison(
            self._workload,
            self._counter,
            systems=self._systems,
            loss_step=WARM_UP + 1 + self._steps,
            make=LinkTraining,
            place=place,
        )
        try:
            for name in heat:
                comparison.start(name)
            comparison.take_turns(self._steps)
            return comparison.rows()
        finally:
            comparison.close()
            self.errors += comparison.errors

    def _with_bound(self, found: Mapping[str, Row], name: str, *, rate: str, megabits: float) -> Row:
        system, row = self._systems[name], found[name]
        compute = found.get(compute_name(system.micro_batches), {}).get("step_s")
        sends = theory_bytes(system, self._parameter_bytes)
        bound = None if sends is None else bound_seconds(compute, sends, parse_rate(rate))
        return {
            "rate": rate,
            "system": name,
            "world": row["world"],
            "step_s": row["step_s"],
            "bound_s": bound,
            "step/bound": ratio(row["step_s"], [bound]),
            "peak_mb": row["peak_mb"],
            "first_step_s": row["first_step_s"],
            "wire_mb": row["wire_mb"],
            "theory_mb": None if sends is None else sends / MB,
            "link_mb": row["link_mb"],
            "link_mbit": megabits,
            "loss": row["loss"],
        }


@contextlib.contextmanager
def cache_folder() -> Iterator[None]:
    """An empty folder for calibrations, in the environment of all processes that are started meanwhile."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            os.environ.update({} if before is None else {"XDG_CACHE_HOME": before})


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description="ZeRO over a slow link.")
    add_arguments(parser)
    parser.add_argument("--rates", help=f"comma-separated, as tc writes them; default {','.join(RATES)}")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps")
    known = [*SYSTEMS, *ACCUMULATING, *FIRST_STEP]
    parser.add_argument(
        "--systems", help=f"comma-separated, of: {', '.join(known)}; default {','.join(DEFAULT)}; references are added"
    )
    options = parser.parse_args(arguments)
    options.rates = options.rates.split(",") if options.rates else ["1gbit"] if options.quick else list(RATES)
    options.systems = options.systems.split(",") if options.systems else list(QUICK if options.quick else DEFAULT)
    unknown = [name for name in options.systems if name not in known]
    if unknown:
        parser.error(f"no system called {unknown[0]!r}; there are {', '.join(known)}")
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be 1 or more")
    for rate in options.rates:
        try:
            parse_rate(rate)
        except ValueError as error:
            parser.error(f"--rates: {error}")
    return options


if __name__ == "__main__":
    sys.exit(main())

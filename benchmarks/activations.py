"""The memory of activations against the time of a step: by checkpointing, by torch's budget, by `memory_limit`.

    python -m benchmarks.activations --json activations.json [--plot frontier.svg]

One rank, stage 0, no process shares anything with another; steps are taken in turns. Systems:
    none           what torch's min-cut saves
    checkpoint     `torch.utils.checkpoint` around each block
    budget-B       torch's `activation_memory_budget` at B
    limit-B        dsgraph with the predicted peak of budget-B as its `memory_limit`
    limit-least    dsgraph with the smallest limit that it can keep
Columns:
    peak_mb        most bytes of tensors alive at once in a step, counted at torch's allocator
    predicted_mb   the simulated peak
    limit_mb       `memory_limit`
    step_s         seconds a step, median over steps taken in turns
    plan_s         seconds of planning
    over           `step_s` over that of budget-B
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import dsgraph
from benchmarks.memory import AllocationCounter, build_counter
from benchmarks.memory_cases import DEEP, LIMITED, Case
from benchmarks.report import MB, Check, Report, Row, add_arguments, machine, ratio
from benchmarks.workers import WorkerError, Workers
from dsgraph.partitioning.blocks.fake_step import around_blocks
from dsgraph.partitioning.state import partition_states
from dsgraph.passes import GraphPass, PassContext, PassResult, Phase
from dsgraph.passes.memory.fit import PLANNED

BUDGETS = (0.9, 0.7, 0.5, 0.35, 0.2, 0.05)
COMPARED = (0.5, 0.2)
WARM_UP, TURNS, STEPS = 3, 4, 3


@dataclass(frozen=True)
class TorchsBudget(GraphPass):
    """A pass that changes no graph; it sets torch's budget for splitting the joint graph.

    The backend refuses to compile beside a budget, with which dropout draws other numbers; these models have none.
    """

    budget: float
    phase = Phase.JOINT

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        functorch_config.activation_memory_budget = self.budget
        return PassResult()

    def fingerprint(self) -> None:
        return None


@dataclass(frozen=True)
class NoBudget(GraphPass):
    """A pass that changes no graph; it resets torch's budget after the split."""

    phase = Phase.FORWARD

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        functorch_config.activation_memory_budget = 1.0
        return PassResult()

    def fingerprint(self) -> None:
        return None


class Training:
    """One system on this rank."""

    def __init__(self, model: str, codegen: str, how: Mapping[str, Any], counter: Path) -> None:
        """Build the model and prepare its compilation.

        Args:
            model: One of `DEEP` or `LIMITED`.
            codegen: See docs/reference/options.md.
            how: `checkpoint`, `budget` or `limit`, `offload` beside it, `stage` (0), or nothing.
            counter: From `build_counter`.
        """
        self._counter = AllocationCounter(counter)
        self._case: Case = {**DEEP, **LIMITED}[model]
        self._how = how
        self._steps = 0
        torch.manual_seed(0)
        module = self._case.build()
        if how.get("checkpoint"):
            _checkpoint_blocks(module)
        module = dsgraph.partition(module, stage=how.get("stage", 0))
        options: dict[str, Any] = {"codegen": codegen}
        if "budget" in how:
            options["pipeline"] = dsgraph.default_pipeline() + [TorchsBudget(how["budget"]), NoBudget()]
        if "limit" in how:
            options["memory_limit"] = how["limit"]
        if "offload" in how:
            options["activation_offload"] = how["offload"]
        self._model: Any = torch.compile(module, backend="dsgraph", options=options)
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def warm_up(self) -> Row:
        """Take the first steps; return bytes and what was planned."""
        # The mesh of a DTensor is an object whose size torch does not know.
        with functorch_config.patch(unsafe_treat_script_objects_as_zero_size=True):
            for _ in range(WARM_UP):
                self._step()
        self._counter.reset_peak()
        self._step()
        report = dsgraph.report(self._model)
        records = [item for each in report.compiles for item in each.passes if item.name == PLANNED]
        return {
            "peak": self._counter.peak,
            "predicted": report.memory.peak,
            "plan_s": sum(record.seconds for record in records) or None,
            "saved": sum(each.activations.saved_bytes or 0 for each in report.compiles if each.activations),
            "moved": _moved(report),
            "plan": [line for record in records for line in record.done],
        }

    def fake_step(self) -> float:
        """Return the seconds of a step on fake tensors, in which blocks compute nothing."""
        model = self._model._orig_mod
        (state,) = partition_states(model)
        started = time.perf_counter()
        around_blocks(model, state.parameters, self._batch(), {})
        return time.perf_counter() - started

    def least(self) -> int:
        """Return the smallest limit that the error names."""
        try:
            self._step()
        except Exception as error:  # Dynamo wraps that of the backend
            found = re.search(r"a step takes ([\d,]+) at least", str(error))
            if found is not None:
                return int(found[1].replace(",", ""))
            raise
        raise AssertionError("one byte was enough")

    def turn(self) -> list[float]:
        """Return the seconds of a few steps."""
        return [self._step() for _ in range(STEPS)]

    def _batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * self._steps)
        case = self._case
        text = torch.randint(0, case.vocab, (case.batch, case.length + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def _step(self) -> float:
        case, (tokens, targets) = self._case, self._batch()
        started = time.perf_counter()
        case.loss(self._model, tokens, targets).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        return time.perf_counter() - started


def _moved(report: dsgraph.Report) -> int:
    """Return the bytes that the forward offloads."""
    done = [line for each in report.compiles for item in each.passes for line in item.done]
    found = [re.fullmatch(r"\d+ saved values? to \w+, (\d+) bytes", line) for line in done]
    return sum(int(match[1]) for match in found if match is not None)


def _checkpoint_blocks(module: nn.Module) -> None:
    blocks = max((part for part in module.modules() if isinstance(part, nn.ModuleList)), key=len)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@dataclass
class _Frontier:
    """The systems of one model, and what was found of each."""

    model: str
    codegen: str
    counter: Path
    errors: list[str]

    def rows(self, budgets: Sequence[float]) -> list[Row]:
        """Measure all systems."""
        groups: dict[str, Workers] = {}
        found: dict[str, Row] = {}
        try:
            for name, how in self._references(budgets):
                self._start(name, how, groups, found)
            for budget in budgets:
                if f"budget-{budget}" in found:
                    limit = {"limit": found[f"budget-{budget}"]["predicted"]}
                    self._start(f"limit-{budget}", limit, groups, found)
            self._start("limit-least", {"limit": self._least()}, groups, found)
            times: dict[str, list[float]] = {name: [] for name in groups}
            for _ in range(TURNS):
                for name, group in groups.items():
                    times[name] += group.call("turn")[0]
        finally:
            for group in groups.values():
                group.dismiss()
            for group in groups.values():
                group.close()
        medians = {name: statistics.median(values) for name, values in times.items()}
        return [self._row(name, found[name], medians) for name in groups]

    def _references(self, budgets: Sequence[float]) -> list[tuple[str, Row]]:
        return [("none", {}), ("checkpoint", {"checkpoint": True}), *((f"budget-{b}", {"budget": b}) for b in budgets)]

    def _start(self, name: str, how: Row, groups: dict[str, Workers], found: dict[str, Row]) -> None:
        label = f"{self.model}, {self.codegen}, {name}"
        try:
            group = Workers(label, Training, self.model, self.codegen, how, self.counter, world=1)
            found[name] = {**group.call("warm_up")[0], **how}
        except WorkerError as error:
            self.errors.append(str(error))
            return
        groups[name] = group
        print(f"{label}: {found[name]['peak'] / MB:.1f} MB, {found[name]['predicted'] / MB:.1f} predicted", flush=True)

    def _least(self) -> int:
        how = {"limit": 1}
        with Workers("least", Training, self.model, self.codegen, how, self.counter, world=1) as group:
            least: int = group.call("least")[0]
        return least

    def _row(self, name: str, found: Row, medians: Mapping[str, float]) -> Row:
        other = name.replace("limit", "budget")
        over = ratio(medians[name], [medians[other]]) if other != name and other in medians else None
        return {
            **{"model": self.model, "codegen": self.codegen, "system": name, "peak_mb": found["peak"] / MB},
            **{"predicted_mb": found["predicted"] / MB, "limit_mb": found["limit"] / MB if "limit" in found else None},
            **{"step_s": medians[name], "plan_s": found["plan_s"], "over": over},
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 when a system failed, otherwise 0, whatever the figures are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations", description="Memory against time.")
    add_arguments(parser)
    parser.add_argument("--models", type=lambda text: text.split(","), help=f"some of {', '.join(DEEP)}")
    parser.add_argument("--codegens", type=lambda text: text.split(","), default=("inductor",))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory against time")
    options = parser.parse_args(arguments)
    models = options.models or (["tiny"] if options.quick else [name for name in DEEP if name != "tiny"])
    codegens = ("eager",) if options.quick else options.codegens
    report, errors = Report(machine=machine(["transformers"])), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        counter = build_counter(Path(folder))
        if counter is None:
            print("no C++ compiler ($CXX, by default g++): nothing counts bytes", file=sys.stderr)
            return 1
        for model in models:
            for codegen in codegens:
                frontier = _Frontier(model, codegen, counter, errors)
                report.rows += frontier.rows(COMPARED if options.quick else BUDGETS)
    report.checks = checks(report.rows)
    report.print()
    report.write(options.json)
    if options.plot:
        plot(report.rows, options.plot)
    for error in errors:
        print(f"\nFAILED {error}", file=sys.stderr)
    return 1 if errors else 0


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the figures to reach, from the rows that were measured."""
    found = []
    for model, codegen in dict.fromkeys((row["model"], row["codegen"]) for row in rows):
        own = {row["system"]: row for row in rows if (row["model"], row["codegen"]) == (model, codegen)}
        where = f"{model}, {codegen}"
        for budget in COMPARED:
            row = own.get(f"limit-{budget}")
            what = f"{where}: step at the memory of torch's budget {budget}, over torch's"
            found.append(Check(what, row["over"] if row else None, 0.95, "lower"))
        least, blocks = own.get("limit-least"), own.get("checkpoint")
        value = least["limit_mb"] / blocks["peak_mb"] if least and blocks else None
        found.append(Check(f"{where}: smallest limit over the peak with checkpointed blocks", value, 0.7, "lower"))
        limited = [row for row in own.values() if row["limit_mb"] is not None]
        over = max((row["peak_mb"] / row["limit_mb"] for row in limited), default=None)
        found.append(Check(f"{where}: largest measured peak over the limit", over, 1.0, "lower"))
        off = max((abs(row["peak_mb"] / row["predicted_mb"] - 1) for row in limited), default=None)
        found.append(Check(f"{where}: largest relative error of the simulated peak", off, 0.1, "lower"))
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the frontier of each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys((row["model"], row["codegen"]) for row in rows))
    figure, axes = pyplot.subplots(1, len(cases), figsize=(6 * len(cases), 4), squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        kinds: dict[str, list[Row]] = {}
        for row in rows:
            if (row["model"], row["codegen"]) == case:
                kinds.setdefault(row["system"].partition("-")[0], []).append(row)
        for kind, points in kinds.items():
            points = sorted(points, key=lambda row: row["peak_mb"])
            line = [row["peak_mb"] for row in points], [row["step_s"] for row in points]
            axis.plot(*line, marker="o", label=kind, linestyle="-" if len(points) > 1 else "none")
        axis.set(title=", ".join(case), xlabel="peak of a step, MB", ylabel="seconds a step", ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())

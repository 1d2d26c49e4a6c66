"""How well `dsgraph.passes.analysis.step_memory` predicts the memory of a training step, and what compiling allocates.

    python -m benchmarks.memory_model --json out.json

Each model is trained on 2 ranks at every ZeRO stage, by both code generators. Columns, of the rank whose prediction is
furthest off:
    predicted_mb  the simulated peak of a step, from the graphs' fake tensors alone, in 10**6 bytes; for Inductor with
                  what `dsgraph.passes.analysis.fusion` knows of its fusion
    unfused_mb    the same without, as if the graphs ran node by node
    measured_mb   most bytes of tensors alive at once in a step, counted at torch's allocator
    error         predicted over measured, minus 1
    where         the part of the step at the simulated peak
    compile_mb    bytes of tensors that the first forward and backward allocated beyond those of a later step

The printed table adds what the simulated peak is made of.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

import dsgraph
from benchmarks.memory import AllocationCounter, build_counter
from benchmarks.memory_cases import CASES
from benchmarks.report import MB, Check, Report, Row, add_arguments, machine
from benchmarks.workers import WorkerError, Workers
from dsgraph.passes import GraphPass, PassContext, PassResult, Phase
from dsgraph.passes.analysis.pair_memory import PairMemory, pair_memory
from dsgraph.passes.analysis.step_memory import StepMemory, simulate_step

WORLD = 2  # ranks
CODEGENS = ("eager", "inductor")
WARM_UP = 3  # steps: the first one compiles, the optimizer makes its state, the last one is as all that follow
MEASURED = 2

DEFAULT = ("gpt", "llama", "gpt2", "bert")
QUICK = ("gpt-small",)


@dataclass
class Graphs:
    """Results of the two recording passes of one model: the memory of each captured graph, plain and fused."""

    pairs: list[PairMemory] = field(default_factory=list)
    fused: list[PairMemory] = field(default_factory=list)
    forward: tuple[GraphModule, PassContext] | None = None

    def add(self, forward: GraphModule, backward: GraphModule | None, ctx: PassContext) -> None:
        """Simulate a captured graph as the code generator gets it."""
        self.pairs.append(pair_memory(forward, backward, params=ctx.params, roles=ctx.roles, axes=ctx.axes))
        self.fused.append(pair_memory(forward, backward, params=ctx.params, roles=ctx.roles, axes=ctx.axes, fused=True))


@dataclass(frozen=True)
class RecordForward(GraphPass):
    """Changes nothing; keeps the forward for `RecordBackward`."""

    graphs: Graphs
    phase = Phase.FORWARD

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        self.graphs.forward = gm, ctx
        if ctx.inference:
            self.graphs.add(gm, None, ctx)
        return PassResult()

    def fingerprint(self) -> None:
        return None  # a graph from a cache would not come by


@dataclass(frozen=True)
class RecordBackward(GraphPass):
    """Changes nothing; simulates a forward and its backward as the code generator gets them."""

    graphs: Graphs
    phase = Phase.BACKWARD

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        assert self.graphs.forward is not None
        forward, forward_ctx = self.graphs.forward
        self.graphs.add(forward, gm, forward_ctx)
        return PassResult()

    def fingerprint(self) -> None:
        return None


class Measured:
    """One model's training on this rank. All ranks call the same methods in the same order."""

    def __init__(
        self, model: str, stage: int, codegen: str, counter: Path, more: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Build the model, partition it, and prepare its compilation.

        Args:
            model: One of `CASES`.
            stage: Of ZeRO.
            codegen: Of the backend.
            counter: From `memory.build_counter`.
            more: Other options of the backend.
        """
        self._counter = AllocationCounter(counter)
        self._case = CASES[model]
        self._codegen = codegen
        self._graphs = Graphs()
        self._steps = 0
        torch.manual_seed(0)
        module = dsgraph.partition(self._case.build(), stage=stage, blocks="none")  # its passes record one graph
        pipeline = dsgraph.default_pipeline() + [RecordForward(self._graphs), RecordBackward(self._graphs)]
        options: dict[str, Any] = {"codegen": codegen, "pipeline": pipeline, **more}
        self._model: Any = torch.compile(module, backend="dsgraph", options=options)
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def measure(self) -> Row:
        """Return this rank's bytes: simulated and measured peak of a step, and what compiling allocated."""
        allocated = [self._step() for _ in range(WARM_UP)]
        gc.collect()  # a compile that ended at a graph break left cycles, which hold the first step's outputs
        self._counter.reset_peak()
        for _ in range(MEASURED):
            self._step()
        unfused, fused = simulate_step(self._graphs.pairs), simulate_step(self._graphs.fused)
        return {
            "predicted": fused if self._codegen == "inductor" else unfused,
            "unfused": unfused.peak,
            "measured": self._counter.peak,
            "compiling": allocated[0] - allocated[-1],
        }

    def _step(self) -> int:
        """Return the bytes that its forward and its backward allocated, freed or not."""
        generator = torch.Generator().manual_seed(1_000_003 * self._steps + dist.get_rank())
        case = self._case
        text = torch.randint(0, case.vocab, (case.batch, case.length + 1), generator=generator)
        tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        del text
        before = self._counter.allocated
        case.loss(self._model, tokens, targets).backward()
        allocated = self._counter.allocated - before
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        return allocated


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 when a case failed, otherwise 0, whatever the figures are."""
    options = _parse(arguments)
    report = Report(machine=machine(["transformers"]))
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        counter = build_counter(Path(folder))
        if counter is None:
            print("no C++ compiler ($CXX, by default g++): nothing counts bytes", file=sys.stderr)
            return 1
        for model in options.models:
            for codegen in options.codegens:
                for stage in options.stages:
                    try:
                        report.rows.append(measure(model, stage, codegen, counter=counter))
                    except WorkerError as error:
                        errors.append(str(error))
    report.checks = checks(report.rows)
    report.print([_in_columns(row) for row in report.rows])
    report.write(options.json)
    for text in errors:
        print(f"\nFAILED {text}", file=sys.stderr)
    return 1 if errors else 0


def measure(model: str, stage: int, codegen: str, *, counter: Path, **more: Any) -> Row:
    """Train one of `CASES` on `WORLD` ranks; return the row of the rank whose prediction is furthest off.

    `more` are other options of the backend.

    Raises:
        WorkerError: A rank failed.
    """
    name = f"{model}, stage {stage}, {codegen}"
    with Workers(name, Measured, model, stage, codegen, counter, more, world=WORLD) as group:
        rank = max(group.call("measure"), key=lambda found: abs(_error(found)))
    predicted: StepMemory = rank["predicted"]
    row = {
        "model": model,
        "stage": stage,
        "codegen": codegen,
        "predicted_mb": predicted.peak / MB,
        "unfused_mb": rank["unfused"] / MB,
        "measured_mb": rank["measured"] / MB,
        "error": _error(rank),
        "where": predicted.at_peak.name,
        "compile_mb": rank["compiling"] / MB,
        "composition_mb": {part: size / MB for part, size in predicted.at_peak.composition.items()},
    }
    print(f"{name}: {row['predicted_mb']:.1f} MB predicted, {row['measured_mb']:.1f} measured", flush=True)
    return row


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the figures to reach, from the rows that were measured."""
    found = []
    for codegen in CODEGENS:
        own = [row for row in rows if row["codegen"] == codegen]
        for column, how in {"predicted_mb": "simulated", "unfused_mb": "simulated node by node"}.items():
            if how == "simulated" or codegen == "inductor":
                found.append(_worst(own, column, f"{how} over measured peak, distance from 1, {codegen}"))
        compiling = max((row["compile_mb"] / row["measured_mb"] for row in own), default=None)
        found.append(Check(f"allocated while compiling over the peak of a step, {codegen}", compiling, 0.05, "lower"))
    return found


def _worst(rows: Sequence[Row], column: str, name: str) -> Check:
    distances = {f"{row['model']}, stage {row['stage']}": abs(row[column] / row["measured_mb"] - 1) for row in rows}
    worst = max(distances, key=lambda case: distances[case], default=None)
    value = None if worst is None else distances[worst]
    return Check(f"{name} (largest of {len(rows)}: {worst or 'none'})", value, 0.10, "lower")


def _error(found: Mapping[str, Any]) -> float:
    return float(found["predicted"].peak / found["measured"] - 1)


def _in_columns(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "composition_mb"} | row["composition_mb"]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_model", description="Memory, as simulated.")
    add_arguments(parser)
    parser.add_argument("--models", help=f"comma-separated, of: {', '.join(CASES)}; default: {', '.join(DEFAULT)}")
    parser.add_argument("--stages", default="0,1,2,3", help="comma-separated ZeRO stages")
    parser.add_argument("--codegens", help=f"comma-separated, of: {', '.join(CODEGENS)}; default: all")
    options = parser.parse_args(arguments)
    options.models = options.models.split(",") if options.models else list(QUICK if options.quick else DEFAULT)
    options.codegens = options.codegens.split(",") if options.codegens else list(CODEGENS[: 1 if options.quick else 2])
    options.stages = options.stages.split(",")
    for given, known in ((options.models, CASES), (options.codegens, CODEGENS), (options.stages, ("0", "1", "2", "3"))):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{unknown[0]!r} is not one of {', '.join(known)}")
    options.stages = [int(stage) for stage in options.stages]
    return options


if __name__ == "__main__":
    sys.exit(main())

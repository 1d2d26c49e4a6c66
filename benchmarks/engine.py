"""The engine: its overhead over a bare loop, a DeepSpeed script on both libraries, and the speed of checkpoints.

    python -m benchmarks.engine --json engine.json

Rows of steps, over the ranks of a system, in one heat for each ZeRO stage:
    step_s        seconds a step; the slowest rank, median over steps taken in turn
    over          `step_s` over that of `bare` of the same stage for `engine`, of `deepspeed` for `dsgraph`

`bare` is partition, torch.compile and AdamW; `engine` the same by `dsgraph.initialize`. `deepspeed` and `dsgraph` are
one script with one JSON file: AdamW, a warm-up, gradients clipped to a norm of 1.

Rows of saving, by turns, medians:
    write_s       seconds in which all ranks together write files of so many bytes, and wait for the disk
    save_s        seconds of `engine.save_checkpoint` with as many bytes of shards and optimizer
    share         `write_s` over `save_s`

Row of saving asynchronously, with as many bytes on each rank:
    step_s        seconds a step, nothing being saved
    stall_s       seconds until `save_checkpoint(asynchronous=True)` returns
    beside_s      seconds a step of 8, the first after that call, the checkpoint complete after the last
    over          `beside_s` over `step_s`
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.comparison import WARM_UP, Comparison
from benchmarks.report import MB, Check, Report, Row, add_arguments, machine, ratio
from benchmarks.systems import SYSTEMS, Step, System, installed
from benchmarks.training import Workload
from benchmarks.workers import WorkerError, Workers
from examples.gpt import GPT

STAGES = (0, 1, 2, 3)
SAVES = 3
ROWS = 64  # of a batch beside which a checkpoint is written
STEPS_BESIDE = 8


class _Wide(nn.Module):
    """Few large parameters, so that there is much to save and little to compile."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(1024, rows, bias=False) for _ in range(8))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([part(inputs).square().mean() for part in self.parts]).sum()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 when a system failed, otherwise 0, whatever the figures are."""
    options = _parse(arguments)
    workload = Workload().quick() if options.quick else Workload()
    report = Report(machine=machine(["deepspeed"]))
    errors: list[str] = []
    for stage in options.stages:
        report.rows += _steps(workload, stage, options, errors)
    if options.save_mb:
        report.rows += _saving(options.save_mb * MB, workload.world, Path(options.folder), errors)
    report.checks = checks(report.rows)
    report.print()
    report.write(options.json)
    for error in errors:
        print(f"\nFAILED {error}", file=sys.stderr)
    return 1 if errors else 0


def systems(stage: int, codegen: str) -> dict[str, System]:
    """Return the systems of one heat."""
    bare = SYSTEMS[f"dsgraph-{stage}" + ("-eager" if codegen == "eager" else "")]
    make = partial(_by_config, stage=stage, codegen=codegen)
    return {
        f"bare-{stage}": bare,
        f"engine-{stage}": System(partial(make, library="dsgraph", script=False), memory=stage),
        f"dsgraph-{stage}": System(partial(make, library="dsgraph", script=True), memory=stage),
        f"deepspeed-{stage}": System(
            partial(make, library="deepspeed", script=True),
            memory=stage,
            is_peer=True,
            environ=(("DS_ACCELERATOR", "cpu"),),
            package="deepspeed",
        ),
    }


def _by_config(model: GPT, *, library: str, stage: int, codegen: str, script: bool) -> Step:
    """Return a loop as one writes it for DeepSpeed; `script` adds to the file what `bare` does not do.

    Bucket sizes are those that transformers derives from the model's width: DeepSpeed's own take buffers of 2 GB.
    """
    size = model.config.width**2
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0 if script else 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "dsgraph": {} if codegen == "inductor" else {"codegen": codegen},
    }
    if script:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}}
        config["zero_optimization"] |= {"reduce_bucket_size": size, "allgather_bucket_size": size}
    engine, *_ = import_module(library).initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _steps(workload: Workload, stage: int, options: argparse.Namespace, errors: list[str]) -> list[Row]:
    known = systems(stage, options.codegen)
    comparison = Comparison(workload, None, systems=known, loss_step=WARM_UP + options.steps)
    try:
        for name in installed(list(known), known):
            comparison.start(name)
        comparison.take_turns(options.steps)
        found = comparison.rows()
    finally:
        comparison.close()
        errors += comparison.errors
    rows = []
    for name, row in found.items():
        kind = name.partition("-")[0]
        over = found.get(f"{ {'engine': 'bare', 'dsgraph': 'deepspeed'}.get(kind) }-{stage}")
        rows.append(
            {
                **{"system": name, "stage": stage, "world": row["world"], "step_s": row["step_s"]},
                **{"over": ratio(row["step_s"], [over["step_s"]]) if over else None, "loss": row["loss"]},
            }
        )
    return rows


class Saving:
    """One rank of an engine whose checkpoint has so many bytes on each rank."""

    def __init__(self, size: int, folder: str) -> None:
        """Make the engine, and step once, so that the optimizer has its averages."""
        import dsgraph

        self._folder, self._size = Path(folder), size
        # Of four bytes, in a parameter and two averages.
        rows = size * dist.get_world_size() // (3 * 4 * 8 * 1024)
        model = _Wide(rows)
        config = {
            **{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "dsgraph": {"compile": False}},
            **{"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}},
        }
        self._engine, *_ = dsgraph.initialize(model=model, config=config)
        self._rows = torch.randn(ROWS, 1024)
        self._step()

    def _step(self) -> float:
        """Return the seconds of a step."""
        started = time.perf_counter()
        self._engine.backward(self._engine(self._rows))
        self._engine.step()
        return time.perf_counter() - started

    def save(self) -> float:
        """Return the seconds of a checkpoint."""
        dist.barrier()
        started = time.perf_counter()
        self._engine.save_checkpoint(self._folder, "benchmark")
        dist.barrier()
        return time.perf_counter() - started

    def alone(self, steps: int) -> float:
        """Return the seconds of so many steps."""
        dist.barrier()
        return sum(self._step() for _ in range(steps))

    def beside(self, steps: int) -> tuple[float, float]:
        """Return the seconds of the call that starts to save, and those of call, steps and wait for the checkpoint."""
        dist.barrier()
        started = time.perf_counter()
        self._engine.save_checkpoint(self._folder, "benchmark", asynchronous=True)
        stall = time.perf_counter() - started
        for _ in range(steps):
            self._step()
        self._engine.wait_for_checkpoint()
        return stall, time.perf_counter() - started

    def write(self) -> float:
        """Return the seconds to write as many bytes to a file and wait for the disk."""
        block = os.urandom(2**24)
        dist.barrier()
        started = time.perf_counter()
        path = self._folder / f"plain-{dist.get_rank()}"
        with path.open("wb") as file:
            for _ in range(self._size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()
        seconds = time.perf_counter() - started
        path.unlink()
        return seconds


def _saving(size: int, world: int, folder: Path, errors: list[str]) -> Iterator[Row]:
    inside = Path(tempfile.mkdtemp(prefix="saving-", dir=folder))
    try:
        with Workers("saving", Saving, size, str(inside), world=world) as ranks:
            ranks.call("save")  # the first one makes files, later ones replace them
            times = [(max(ranks.call("write")), max(ranks.call("save"))) for _ in range(SAVES)]
            turns = [(max(ranks.call("alone", STEPS_BESIDE)), ranks.call("beside", STEPS_BESIDE)) for _ in range(SAVES)]
    except WorkerError as error:
        errors.append(str(error))
        return
    finally:
        shutil.rmtree(inside, ignore_errors=True)
    write, save = (statistics.median(column) for column in zip(*times, strict=True))
    yield {
        **{"case": f"a checkpoint, {size // MB} MB a rank", "world": world, "write_s": write, "save_s": save},
        **{"write_mb_s": world * size / MB / write, "save_mb_s": world * size / MB / save, "share": write / save},
    }
    step = statistics.median(alone for alone, _ in turns) / STEPS_BESIDE
    beside = statistics.median(max(total for _, total in found) for _, found in turns) / STEPS_BESIDE
    stall = statistics.median(max(stall for stall, _ in found) for _, found in turns)
    yield {
        **{"case": f"a checkpoint during steps, {size // MB} MB a rank", "world": world, "step_s": step},
        **{"stall_s": stall, "beside_s": beside, "over": beside / step},
    }


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the figures to reach, from the rows that were measured."""
    found = []
    for kind, what, limit in (
        ("engine", "engine over the bare loop, step time", 1.02),
        ("dsgraph", "step time of one script, dsgraph over DeepSpeed", 0.75),
    ):
        over = [row["over"] for row in rows if row.get("system", "").startswith(kind) and row["over"] is not None]
        stages = [str(row["stage"]) for row in rows if row.get("system", "").startswith(kind)]
        name = f"{what} (median of stages {', '.join(stages) or 'none'})"
        found.append(Check(name, statistics.median(over) if over else None, limit, "lower"))
    shares = [row["share"] for row in rows if "share" in row]
    size = next((row["case"].partition(", ")[2] for row in rows if "share" in row), "not measured")
    found.append(
        Check(f"checkpoint write rate over the disk's ({size})", min(shares) if shares else None, 0.80, "higher")
    )
    beside = [row["over"] for row in rows if "beside_s" in row]
    found.append(
        Check("step time while a checkpoint is written, over step time", beside[0] if beside else None, 1.05, "lower")
    )
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description="The engine's costs.")
    add_arguments(parser)
    parser.add_argument("--stages", type=lambda text: [int(part) for part in text.split(",") if part], default=STAGES)
    parser.add_argument("--steps", type=int, default=16, help="timed steps of each system (default: 16)")
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--save-mb", type=int, help="MB that each rank saves; 0: none (default: 1000)")
    parser.add_argument("--folder", default=".", help="where checkpoints are written: on the disk to be measured")
    options = parser.parse_args(arguments)
    if any(stage not in STAGES for stage in options.stages):
        parser.error(f"--stages is {options.stages}; it takes some of {', '.join(map(str, STAGES))}")
    if options.save_mb is None:
        options.save_mb = 10 if options.quick else 1000
    if options.quick:
        options.codegen = "eager"
    return options


if __name__ == "__main__":
    sys.exit(main())

"""Pipelines of stages: balance, time of splitting, and a step over a slow link against DDP.

    python -m benchmarks.parallel --json parallel.json

Linux and root for the link: the two ranks stand on hosts of their own, see `benchmarks.namespaces`; `--rate none`
leaves it out. dsgraph is calibrated first, on the two hosts. A step has the same rows in every system, in 4
micro-batches. DDP sends gradients once a step (`no_sync`); a pipeline sends what its stages exchange. "interleaved" is
Interleaved1F1B, "zero-bubble" ZBVZeroBubble, both with two stages a rank. Columns of the link's rows are those of
`benchmarks.links`; of the others:
    balance     cost of the most expensive stage over the mean, by the cost model
    capture_s   seconds of capturing the model as one graph
    split_s     seconds of finding the cuts
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dsgraph
from benchmarks.links import Calibrator, LinkComparison, LinkTraining, cache_folder
from benchmarks.namespaces import LinkError, Placement, linked_hosts, parse_rate, require_hosts
from benchmarks.report import Check, Report, Row, add_arguments, ratio, table
from benchmarks.systems import ACCUMULATING, MICRO_BATCHES, Step, System
from benchmarks.training import Workload
from benchmarks.workers import Workers
from dsgraph.parallel.pipeline.captured_model import capture_model
from dsgraph.parallel.pipeline.model_copy import without_values
from dsgraph.passes.parallel.stages.split_stages import SplitStages
from examples.gpt import GPT, GPTConfig

RANKS = 2
DDP = f"ddp-x{MICRO_BATCHES}"
PIPELINE = f"pipeline-x{MICRO_BATCHES}"
INTERLEAVED, ZERO_BUBBLE = f"interleaved-x{MICRO_BATCHES}", f"zero-bubble-x{MICRO_BATCHES}"
STAGES = (2, 4)
BALANCED_LAYERS, SPLIT_LAYERS = 12, 96


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 when a system failed, 2 when two hosts cannot be made here."""
    options = _parse(arguments)
    report = Report()
    layers = (4,) if options.quick else (BALANCED_LAYERS, SPLIT_LAYERS)
    report.rows = [row for kind in ("gpt", "llama") for count in layers for row in _splits(kind, count)]
    errors: list[str] = []
    if options.rate is not None:
        try:
            require_hosts()
            rows, errors = _over_link(options)
        except LinkError as error:
            print(f"benchmarks.parallel: {error}", file=sys.stderr)
            return 2
        report.rows += rows
    report.checks = _checks(report.rows)
    print(table(report.rows), flush=True)
    report.write(options.json)
    report.print()
    for text in errors:
        print(f"\nFAILED {text}", file=sys.stderr)
    return 1 if errors else 0


def _splits(kind: str, layers: int) -> list[Row]:
    """Return how a model is split, by number of stages."""
    tokens = torch.zeros(2, 64, dtype=torch.long)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=512, width=256, layers=layers)) if kind == "gpt" else _llama(layers)
    args, kwargs = ((tokens, tokens), {}) if kind == "gpt" else ((), {"input_ids": tokens, "labels": tokens})
    started = time.perf_counter()
    cpu = torch.device("cpu")
    captured = capture_model(without_values(model, cpu), args, kwargs=kwargs, device=cpu)
    capture = time.perf_counter() - started
    rows = []
    for stages in STAGES:
        started = time.perf_counter()
        plan = SplitStages(stages).plan(captured.graph_module.graph, captured.costs)
        split = time.perf_counter() - started
        name = f"{kind}, {layers} layers, {stages} stages"
        rows.append({"case": name, "layers": layers, "balance": plan.balance, "capture_s": capture, "split_s": split})
    return rows


def _llama(layers: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, use_cache=False))


def _pipeline(model: GPT, *, schedule: str = "1F1B", compiled: bool = True) -> Step:
    """Return a step on stages."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    made: list[tuple[dsgraph.PipelinedModel, torch.optim.Optimizer]] = []

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        if not made:  # the first batch tells the size of a micro-batch
            example = (tokens.chunk(MICRO_BATCHES)[0], targets.chunk(MICRO_BATCHES)[0])
            how = {"microbatches": MICRO_BATCHES, "schedule": schedule, "options": {} if compiled else None}
            parts = dsgraph.pipeline(model, mesh, example, **how)
            made.append((parts, torch.optim.AdamW(list(parts.parameters()), lr=1e-3, fused=True)))
        parts, optimizer = made[0]
        loss = parts.step(tokens, targets)
        optimizer.step()
        parts.zero_grad()
        return loss

    return step


SYSTEMS = {
    DDP: ACCUMULATING[DDP],
    PIPELINE: System(_pipeline, alone=True, micro_batches=MICRO_BATCHES),
    f"{PIPELINE}-eager": System(partial(_pipeline, compiled=False), alone=True, micro_batches=MICRO_BATCHES),
    INTERLEAVED: System(partial(_pipeline, schedule="Interleaved1F1B"), alone=True, micro_batches=MICRO_BATCHES),
    ZERO_BUBBLE: System(partial(_pipeline, schedule="ZBVZeroBubble"), alone=True, micro_batches=MICRO_BATCHES),
}


def _over_link(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Return a row a system, timed in turns on two hosts; and what went wrong."""
    workload = Workload(world=RANKS).quick() if options.quick else Workload(world=RANKS)
    with linked_hosts(parse_rate(options.rate)) as hosts, cache_folder():
        place = Placement(hosts)
        with Workers("calibrate", Calibrator, world=RANKS, place=place) as calibrators:
            calibrators.call("calibrate")
        comparison = LinkComparison(*(workload, None), systems=SYSTEMS, loss_step=2, make=LinkTraining, place=place)
        try:
            for name in SYSTEMS:
                comparison.start(name)
            comparison.take_turns(options.steps)
            rows = comparison.rows()
        finally:
            comparison.close()
    kept = ("step_s", "first_step_s", "link_mb", "loss")
    found = [{"case": name, "rate": options.rate} | {key: row[key] for key in kept} for name, row in rows.items()]
    return found, comparison.errors


def _checks(rows: Sequence[Row]) -> list[Check]:
    by_case = {row["case"]: row for row in rows}
    splits = [row for row in rows if "balance" in row]
    found = [
        Check(f"{row['case']}: balance", row["balance"], 1.10, "lower")
        for row in splits
        if row["layers"] == BALANCED_LAYERS
    ]
    longest = [row["split_s"] for row in splits if row["layers"] == SPLIT_LAYERS]
    if longest:
        found.append(Check(f"{SPLIT_LAYERS} layers: seconds of splitting", max(longest), 10, "lower"))
    if {DDP, PIPELINE} <= by_case.keys():
        for ours in (PIPELINE, f"{PIPELINE}-eager"):
            value = ratio(by_case[ours]["step_s"], [by_case[DDP]["step_s"]])
            found.append(Check(f"{by_case[DDP]['rate']}: step of {ours} over {DDP}", value, 0.35, "lower"))
    for other in (INTERLEAVED, PIPELINE) if ZERO_BUBBLE in by_case else ():
        value = ratio(by_case[ZERO_BUBBLE]["step_s"], [by_case[other]["step_s"]])
        found.append(Check(f"{by_case[other]['rate']}: step of {ZERO_BUBBLE} over {other}", value, 1.0, "lower"))
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description="Pipelines of stages.")
    add_arguments(parser)
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc writes it, or none; default 100mbit")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    options = parser.parse_args(arguments)
    options.rate = None if options.rate == "none" else options.rate
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be 1 or more")
    try:
        parse_rate(options.rate or "unlimited")
    except ValueError as error:
        parser.error(f"--rate: {error}")
    return options


if __name__ == "__main__":
    sys.exit(main())

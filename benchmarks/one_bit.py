"""1-bit Adam and LAMB against DDP and its hooks: what `benchmarks.compressed` measures of them.

Two hosts joined by a link of a set rate, see `benchmarks.links`, which needs root.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.links import LinkRun, cache_folder
from benchmarks.memory import build_counter
from benchmarks.namespaces import Placement, linked_hosts, parse_rate
from benchmarks.report import MB, Check, Row
from benchmarks.systems import SYSTEMS, Step, System, compute_systems, trainer
from benchmarks.training import Workload
from benchmarks.workers import WorkerError, Workers
from dsgraph.tools.cli.inspect.plots import new_grid, save
from examples.gpt import GPT, GPTConfig
from examples.text import standard_library

RATES = ("100mbit", "1gbit")
_LOSS_RATE = "100mbit"
_SIZE, _TIME = 8, 128  # sequences of a rank's step, tokens of each
_HELD_OUT, _EVERY = 16, 10
_WARM_UP = 0.15  # the share of steps before freeze_step
_COPY_NUMBERS, _COPY_TIMES = 2**20, 31  # the largest parameters of a model of 27 M have 4 times as many
_POWER_RANK = 4
_ONE_BUCKET_MB = 2**12

Schedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def _adam(model: nn.Module, *, freeze_step: int = 0, lr: float = 1e-3) -> torch.optim.Optimizer:
    from dsgraph.optim.one_bit import OneBitAdam

    if freeze_step:
        return OneBitAdam(model.parameters(), model, lr=lr, freeze_step=freeze_step, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def _lamb(model: nn.Module, *, freeze_step: int = 0, lr: float = 1e-2) -> torch.optim.Optimizer:
    from dsgraph.optim.lamb import Lamb
    from dsgraph.optim.one_bit import OneBitLamb

    if freeze_step:
        return OneBitLamb(model.parameters(), model, lr=lr, freeze_step=freeze_step, weight_decay=0.01)
    return Lamb(model.parameters(), lr=lr, weight_decay=0.01)


def _dsgraph(model: GPT, *, optimizer: Callable[..., torch.optim.Optimizer], schedule: Schedule | None = None) -> Step:
    import dsgraph

    dsgraph.partition(model, stage=0)
    compiled = torch.compile(model, backend="dsgraph")
    return _stepping(compiled, optimizer(model), schedule)


def _ddp(model: GPT, *, hook: str, schedule: Schedule | None = None) -> Step:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    # Of several buckets, PowerSGD's second exchanges start in the order in which the first end, which with gloo is not
    # the same on all ranks: it has one bucket.
    buckets = {"bucket_cap_mb": _ONE_BUCKET_MB} if hook == "powersgd" else {}
    ddp = nn.parallel.DistributedDataParallel(model, **buckets)
    if hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=_POWER_RANK, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _stepping(ddp, _adam(model), schedule)


def _stepping(model: Callable[..., Tensor], optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> Step:
    step, rates = trainer(model, optimizer), schedule(optimizer) if schedule is not None else None

    def step_and_schedule(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = step(tokens, targets)
        if rates is not None:
            rates.step()
        return loss

    return step_and_schedule


def link_systems() -> dict[str, System]:
    """Return the systems whose steps are timed over a link; 1-bit Adam after its one step of warm-up."""
    return {
        "ddp": SYSTEMS["ddp"],
        "ddp-fp16": System(partial(_ddp, hook="fp16"), memory=0),
        "ddp-powersgd": System(partial(_ddp, hook="powersgd"), memory=0),
        "dsgraph-0": SYSTEMS["dsgraph-0"],
        "1-bit-adam": System(partial(_dsgraph, optimizer=partial(_adam, freeze_step=1)), memory=0),
        **compute_systems(2),
    }


def over_links(*, quick: bool) -> tuple[list[Row], list[str]]:
    """Return the step time and bytes at each rate, and what went wrong."""
    workload = Workload(world=2).quick() if quick else Workload(world=2)
    systems = link_systems()
    names = [name for name in systems if not name.startswith("compute")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run = LinkRun(workload, systems, build_counter(Path(folder)), 2 if quick else 4)
        for rate in RATES[1:] if quick else RATES:
            for row in run.measure(rate, names):
                kept = ("rate", "system", "step_s", "peak_mb", "first_step_s", "link_mb")
                rows.append({key: row[key] for key in kept})
    return rows, run.errors


class LossTraining:
    """A byte-level GPT on real text, on one of two ranks."""

    def __init__(self, system: str, steps: int, config: GPTConfig) -> None:
        """Set the system up.

        Args:
            system: One of `loss_systems`.
            steps: Of the whole schedule.
            config: Sizes of the model.
        """
        torch.manual_seed(0)
        self._text, self._model = standard_library(), GPT(config)
        self._step = loss_systems(steps)[system](self._model)
        self._done = 0

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Return seconds and loss of each of the next steps, over both ranks."""
        found = []
        for _ in range(steps):
            at = (self._done, dist.get_rank())
            batch = self._text.batch(at[0], size=_SIZE, time=_TIME, seed=0, rank=at[1], world=2)
            started = time.perf_counter()
            loss = self._step(*batch)
            found.append((time.perf_counter() - started, float(loss)))
            self._done += 1
        return found

    def held_out(self) -> float:
        """Return nats a byte on text that no step has seen."""
        self._model.eval()
        batches = [
            self._text.held_out_batch(at, _HELD_OUT, size=_SIZE, time=_TIME, rank=0, world=1) for at in range(_HELD_OUT)
        ]
        with torch.no_grad():
            return statistics.mean(float(self._model(*batch)) for batch in batches)


def loss_systems(steps: int) -> Mapping[str, Callable[[GPT], Step]]:
    """Return by name, what trains for so many steps, all with the same schedule of learning rates."""
    freeze_step = max(1, int(_WARM_UP * steps))

    def factor(step: int) -> float:
        rise = steps / 10
        return min((step + 1) / rise, (steps - step) / (steps - rise))

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    return {
        "ddp": partial(_ddp, hook="", schedule=schedule),
        "ddp-fp16": partial(_ddp, hook="fp16", schedule=schedule),
        "ddp-powersgd": partial(_ddp, hook="powersgd", schedule=schedule),
        "adam": partial(_dsgraph, optimizer=_adam, schedule=schedule),
        "1-bit-adam": partial(_dsgraph, optimizer=partial(_adam, freeze_step=freeze_step), schedule=schedule),
        "lamb": partial(_dsgraph, optimizer=_lamb, schedule=schedule),
        "1-bit-lamb": partial(_dsgraph, optimizer=partial(_lamb, freeze_step=freeze_step), schedule=schedule),
    }


def losses(*, quick: bool) -> tuple[list[Row], list[str]]:
    """Return one row a system: held-out loss, and that of every tenth step with the seconds until then; and errors."""
    steps, config = (20, GPTConfig(width=32, layers=2)) if quick else (300, GPTConfig(width=128, layers=4))
    rows, errors = list[Row](), list[str]()
    with linked_hosts(parse_rate(_LOSS_RATE)) as hosts, cache_folder():
        for system in loss_systems(steps):
            try:
                with Workers(system, LossTraining, system, steps, config, world=2, place=Placement(hosts)) as group:
                    first, second = group.call("train", steps)
                    held_out = statistics.mean(group.call("held_out"))
            except WorkerError as error:
                errors.append(str(error))
                continue
            times = [max(a, b) for (a, _), (b, _) in zip(first, second, strict=True)]
            found = [(a + b) / 2 for (_, a), (_, b) in zip(first, second, strict=True)]
            # A compile is no part of a step: the seconds of one that compiles are those of the median step.
            usual = statistics.median(times)
            times = [usual if seconds > 5 * usual else seconds for seconds in times]
            at = range(0, steps, _EVERY)
            rows.append(
                {
                    "system": system,
                    "held_out": held_out,
                    "step_s": usual,
                    "seconds": [round(sum(times[: step + 1]), 3) for step in at],
                    "losses": [round(statistics.mean(found[step : step + _EVERY]), 4) for step in at],
                }
            )
            print(f"{system}: held-out loss {held_out:.4f}, {usual:.3f} s a step", flush=True)
    return rows, errors


def copying() -> Row:
    """Return a reduction of one rank's gradient, compressed, beside a plain copy of the gradient."""
    import dsgraph  # noqa: F401  # registers the op

    count = _COPY_NUMBERS
    grad, momentum, error, owned = (torch.randn(count) for _ in range(4))
    target, coefficients = torch.empty(count), torch.tensor([0.9, 0.1])

    def reduce() -> None:
        torch.ops.dsgraph.reduce_compressed(
            grad, [count], momentum, error, owned, coefficients, group="", splits_rows=False
        )

    seconds: dict[str, list[float]] = {"copy": [], "compressed": []}
    for _ in range(_COPY_TIMES):
        for name, run in (("copy", lambda: target.copy_(grad)), ("compressed", reduce)):
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    copy, compressed = (statistics.median(each) for each in seconds.values())
    return {"mb": 4 * count / MB, "copy_s": copy, "compressed_s": compressed, "ratio": compressed / copy}


def checks(links: Sequence[Row], trained: Sequence[Row], copied: Row | None) -> list[Check]:
    """Return the figures to reach."""
    found = []
    by_rate = {rate: {row["system"]: row for row in links if row["rate"] == rate} for rate in RATES}
    for rate, rows in by_rate.items():
        if not {"1-bit-adam", "ddp", "ddp-fp16"} <= rows.keys():
            continue
        mine = rows["1-bit-adam"]
        if rate == RATES[0]:
            plain, half = rows["ddp"]["link_mb"], rows["ddp-fp16"]["link_mb"]
            share = _WARM_UP + (1 - _WARM_UP) / 16
            total = (_WARM_UP * half + (1 - _WARM_UP) * mine["link_mb"]) / half
            found += [
                Check("bytes of a compressed step over fp32's", mine["link_mb"] / plain, 1 / 30, "lower"),
                Check("bytes of a compressed step over fp16's", mine["link_mb"] / half, 1 / 15, "lower"),
                Check("bytes of all steps, 15 % warm-up, fp16, over w + (1 - w) / 16", total / share, 1.05, "lower"),
                Check(f"{rate}: step over DDP's", mine["step_s"] / rows["ddp"]["step_s"], 0.35, "lower"),
            ]
        for hook in (name for name in rows if name in ("ddp-fp16", "ddp-powersgd")):
            name = f"{rate}: step over that of {hook}"
            found.append(Check(name, mine["step_s"] / rows[hook]["step_s"], 1.0, "lower"))
    held_out = {row["system"]: row["held_out"] for row in trained}
    for plain, compressed in (("adam", "1-bit-adam"), ("lamb", "1-bit-lamb")):
        if {plain, compressed} <= held_out.keys():
            name = f"held-out loss of {compressed} over {plain}'s"
            found.append(Check(name, held_out[compressed] / held_out[plain], 1.01, "lower"))
    if copied is not None:
        found.append(Check("compressing on one rank over a plain copy", copied["ratio"], 3.0, "lower"))
    return found


def draw(trained: Sequence[Row], path: Path) -> None:
    """A picture of the losses over steps, and over seconds."""
    figure, ((over_steps, over_seconds),) = new_grid(rows=1, height=4, widths=(1, 1))
    for row in trained:
        losses = row["losses"]
        over_steps.plot([_EVERY * number for number in range(len(losses))], losses, label=row["system"])
        over_seconds.plot(row["seconds"], losses)
    over_steps.set(xlabel="step", ylabel="loss, nats a byte")
    over_seconds.set(xlabel=f"seconds, {_LOSS_RATE}")
    over_steps.legend()
    save(figure, path)

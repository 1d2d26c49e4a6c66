"""Output of an engine about its steps: printed lines, scalars in files, times, memory, the profile.

It changes no step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsgraph.engine.config.read_config import ResolvedConfig
from dsgraph.engine.training_state import TrainingState
from dsgraph.inductor_ext import Ranks, sum_over
from dsgraph.partitioning.blocks.repeated_blocks import is_block

from .collective_times import CollectiveTimes
from .flop_counter import CountedGraphs
from .flops_profiler import FlopsProfiler
from .memory_breakdown import memory_use, peak_bytes
from .monitors import Monitor, check_monitors, monitors_of
from .step_times import Speed, Stopwatch, Work, tokens_in

_SCALARS = "Train/Samples/"


class StepLogger:
    """Observes each step of an engine.

    The loss that is shown is the mean over all ranks, for which one number is sent. It is read, which waits for the
    device, only in steps that are shown.

    Attributes:
        stopwatch: Times the parts of a step.
        graphs: Counts the operations of compiled graphs; None if nothing needs them.
        profiler: Makes the profile; None if it is off.
    """

    def __init__(self, resolved: ResolvedConfig, device: torch.device) -> None:
        """Make what the configuration asks for, files included, before anything is partitioned.

        Raises:
            ConfigError: A file cannot be written, or TensorBoard is not installed.
        """
        config = resolved.config
        check_monitors(config)
        self._resolved, self._device = resolved, device
        self._is_first = dist.get_rank() == 0
        self._monitors: list[Monitor] = monitors_of(config) if self._is_first else []
        self._writes = config.tensorboard.enabled or config.csv_monitor.enabled or bool(config.dsgraph.metrics_file)
        self.stopwatch = Stopwatch(device, is_on=config.wall_clock_breakdown)
        self._collectives = CollectiveTimes(device)
        self.graphs = CountedGraphs() if config.dsgraph.compile and config.steps_per_print else None
        self.profiler = None
        if config.flops_profiler.enabled:
            self.profiler = FlopsProfiler(config.flops_profiler, is_first=self._is_first)
        self._loss: Tensor | None = None
        self._memory: dict[str, int] = {}
        self._under_way: dict[str, float] = {}
        self._tokens = self._steps = 0
        self._line_speed, self._step_speed = Speed(), Speed()

    @property
    def _watches(self) -> bool:
        return self._writes or bool(self._resolved.config.steps_per_print)

    def forward(
        self, state: TrainingState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Return a context for the forward of a micro-batch in training."""
        self.count_tokens(args, kwargs)
        if self.profiler is not None and self.profiler.is_due(state.counts, self._resolved.batch.micro_batches):
            self.profiler.measure(state.module, state.partition, args, kwargs)
        if self._resolved.config.wall_clock_breakdown and self._is_due(state.counts.steps + 1):
            self._collectives.begin()
        return self.stopwatch.part("forward")

    def count_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the tokens in a batch of this rank, for all ranks with batches of their own."""
        if self._watches:
            batch = self._resolved.batch
            self._tokens += tokens_in(args, kwargs) * (batch.step // (batch.micro * batch.micro_batches))

    def take_loss(self, share: Tensor, *, begins: bool = True) -> None:
        """Add the loss of a micro-batch, divided by their number, to that of the step, which it may begin."""
        if self._watches:
            share = share.detach().float()
            self._loss = share if begins or self._loss is None else self._loss + share

    def _is_due(self, steps: int) -> bool:
        every = self._resolved.config.steps_per_print
        return every is not None and steps % every == 0

    def measure_memory(self, state: TrainingState) -> None:
        """Measure memory while gradients are there."""
        if self._resolved.config.memory_breakdown and self._is_due(state.counts.steps + 1):
            self._memory = memory_use(state.partition, state.optimizer)

    def after_step(self, state: TrainingState) -> None:
        """Print and write what there is to log of a step. All ranks call it together."""
        steps = state.counts.steps
        self._steps += 1
        self.stopwatch.step_is_over()
        if self.profiler is not None:
            self.profiler.step_is_over(state.module, state.partition)
        is_due = self._is_due(steps)
        loss, self._loss = self._loss, None
        if not is_due and not self._writes:
            return
        value = self._over_ranks(loss, state.loss_groups)
        times = self.stopwatch.finish_window() if is_due else {}
        if times:
            self._under_way = self._collectives.end()
            times |= self._under_way
        if not self._is_first:
            return
        if self._writes:
            self._write(state, value, times)
        if is_due:
            print(self._lines(state, value, times), flush=True)

    def timings(self) -> dict[str, float]:
        """See `Engine.timings`."""
        return self.stopwatch.means() | self._under_way

    def _over_ranks(self, loss: Tensor | None, names: Sequence[str]) -> float:
        """Return the mean of the ranks' losses; NaN if none of them has run a backward."""
        if loss is None:
            loss = torch.full((), math.nan, device=self._device)
        groups = [Ranks.of(name) for name in names]
        return float(sum_over(loss.detach(), groups)) / math.prod(group.size for group in groups)

    def _work(self) -> Work:
        flops = self.graphs.total or None if self.graphs is not None else None
        return Work(self._steps * self._resolved.batch.step, self._tokens, flops)

    def _write(self, state: TrainingState, loss: float, times: dict[str, float]) -> None:
        scalars = {"train_loss": loss, "lr": state.get_lr()[0]}
        if self._resolved.config.fp16.enabled:
            scalars["loss_scale"] = state.loss_scale.scale
        if state.norm is not None:
            scalars["grad_norm"] = state.norm
        scalars |= self._step_speed.look(self._work())
        scalars |= {f"elapsed_time_ms_{name}": value for name, value in times.items()}
        named = {f"{_SCALARS}{name}": value for name, value in scalars.items()}
        samples = state.counts.steps * self._resolved.batch.step
        for monitor in self._monitors:
            monitor.write(named, step=state.counts.steps, samples=samples)

    def _lines(self, state: TrainingState, loss: float, times: dict[str, float]) -> str:
        config, counts = self._resolved.config, state.counts
        skipped = f", {counts.skipped} skipped" if counts.skipped else ""
        parts = [f"loss {loss:.4g}", f"lr {', '.join(f'{rate:.4g}' for rate in state.get_lr())}"]
        if config.fp16.enabled:
            parts.append(f"loss scale {state.loss_scale.scale:g}")
        # Only what is compiled is counted, and code between blocks may be uncompiled.
        modules = state.module.modules() if isinstance(state.module, nn.Module) else ()
        of = " of compiled code" if any(map(is_block, modules)) else ""
        units = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s", "tflops": f"TFLOPS per rank{of}"}
        speed = self._line_speed.look(self._work())
        parts += [f"{value:.4g} {units[name]}" for name, value in speed.items()]
        parts.append(f"{peak_bytes(self._device) / 2**20:.5g} MiB peak")
        lines = [f"step {counts.steps}{skipped}: {', '.join(parts)}"]
        if times:
            lines.append("  ms per step: " + ", ".join(f"{name} {value:.4g}" for name, value in times.items()))
        if self._memory:
            lines.append("  MiB: " + ", ".join(f"{name} {value / 2**20:.4g}" for name, value in self._memory.items()))
        return "\n".join(lines)

    def close(self) -> None:
        """Write the rest."""
        for monitor in self._monitors:
            monitor.close()
        self._monitors = []
        self._writes = False
        self._collectives.end()

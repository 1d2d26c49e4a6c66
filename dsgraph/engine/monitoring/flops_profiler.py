"""The FLOPS profiler: parameters, operations and time of each module, for one micro-batch of one rank.

Compiled code has no module boundaries, and equal blocks share a graph. Operations are therefore counted in a copy of
the model on fake tensors (`dsgraph.compiler.module_flops`), and latency is measured in an additional uncompiled
forward, without gradients. A profile does not change how the model is compiled.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsgraph.checkpoint.step_counts import StepCounts
from dsgraph.compiler.module_flops import ModuleFlops, model_flops
from dsgraph.engine.config.engine_config import FlopsProfilerConfig
from dsgraph.partitioning.state import PartitionState
from dsgraph.utils.errors import ConfigError, on_one_line
from dsgraph.utils.files import write_whole

from .profile_text import profile_text


@dataclass(frozen=True)
class ModuleProfile:
    """One module, with all that is inside it.

    Attributes:
        name: Its name in the model; empty for the model.
        kind: The name of its class.
        parameters: Elements of its parameters, each once.
        forward: Floating-point operations of its forward, a multiplication and an addition counted as two.
        backward: Those of its derivative.
        seconds: Time of its calls, uncompiled.
    """

    name: str
    kind: str
    parameters: int
    forward: int
    backward: int
    seconds: float

    @property
    def macs(self) -> int:
        """Multiply-add operations of the forward."""
        return self.forward // 2

    @property
    def depth(self) -> int:
        """0 for the model, 1 for its children."""
        return self.name.count(".") + 1 if self.name else 0


class FlopsProfiler:
    """A profiler of one step.

    Attributes:
        modules: The profile, in the order of `named_modules()`; empty before its step.
    """

    def __init__(self, section: FlopsProfilerConfig, *, is_first: bool) -> None:
        """Create a profiler.

        Raises:
            ConfigError: The output file cannot be written.
        """
        self._section, self._is_first = section, is_first
        self._seconds: Mapping[str, float] | None = None
        self._flops, self._unknown = ModuleFlops(), ""
        self.modules: tuple[ModuleProfile, ...] = ()
        if section.output_file is not None and is_first:
            self._write("the profile is not available yet")

    def _write(self, text: str) -> None:
        path = Path(self._section.output_file or "")
        try:
            write_whole(path, f"{text}\n".encode())
        except OSError as error:
            raise ConfigError(f"flops_profiler.output_file: {path} cannot be written: {error.strerror}") from error

    def is_due(self, counts: StepCounts, micro_batches: int) -> bool:
        """Return whether the micro-batch that begins is the first one of the profiled step."""
        is_step = counts.steps == self._section.profile_step and counts.micro % micro_batches == 0
        return is_step and self._seconds is None

    def measure(
        self, model: nn.Module, partition: PartitionState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Run the model once more, uncompiled; random numbers and buffers are restored. All ranks call it."""
        self._seconds = latencies(model, args, kwargs)
        try:
            self._flops = model_flops(model, partition.parameters, args, kwargs)
        except Exception as error:  # a failed count must not end training: the error is shown with the profile
            self._unknown = on_one_line(error)[:200]

    def step_is_over(self, model: nn.Module, partition: PartitionState) -> None:
        """Make and write the profile, if this was its step."""
        if self._seconds is None or self.modules:
            return
        forward, backward = _with_outer(self._flops.forward), _with_outer(self._flops.backward)
        parameters = _parameters(model, partition)
        seconds = self._seconds
        self.modules = tuple(
            ModuleProfile(
                name, _kind(module), parameters.get(name, 0), forward[name], backward[name], seconds.get(name, 0.0)
            )
            for name, module in model.named_modules()
        )
        if not self._is_first:
            return
        text = profile_text(self.modules, self._section, unknown=self._unknown)
        if self._section.output_file is not None:
            self._write(text)
        else:
            print(text, flush=True)


def _kind(module: nn.Module) -> str:
    """Return the name of the user's class: `partition` derives a class of the same name from it."""
    return type(module).__name__


def _outer(name: str) -> Iterator[str]:
    """Yield a module and all modules that contain it: "a.b" -> "", "a", "a.b"."""
    yield ""
    parts = name.split(".") if name else []
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _with_outer(flops: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for innermost, operations in flops.items():
        for name in _outer(innermost):
            found[name] += operations
    return found


def _parameters(model: nn.Module, partition: PartitionState) -> dict[str, int]:
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, int] = defaultdict(int)
    for entry in partition.parameters:
        inside = {outer for module, _ in entry.owners for outer in _outer(names.get(id(module), ""))}
        for name in inside:
            found[name] += entry.param.numel()
    return found


def latencies(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each module in one uncompiled forward, by name; random numbers and buffers are restored."""
    device = next(model.parameters()).device
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    found: dict[str, float] = defaultdict(float)
    began: dict[str, list[float]] = defaultdict(list)
    handles = []

    def begin(name: str) -> None:
        wait()
        began[name].append(time.perf_counter())

    def end(name: str) -> None:
        wait()
        found[name] += time.perf_counter() - began[name].pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: begin(name)))
        handles.append(module.register_forward_hook(lambda *_, name=name: end(name)))
    try:
        with torch.no_grad(), _as_before(model, device):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return _with_containers(found, model)


@contextmanager
def _as_before(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore random numbers and buffers at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    indices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=indices):
        try:
            yield
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)


def _with_containers(seconds: Mapping[str, float], model: nn.Module) -> dict[str, float]:
    """Return the times, extended by modules that are never called, as a `ModuleList`: the sum of their children."""
    found = dict(seconds)
    for name, module in reversed(list(model.named_modules())):
        if name not in found:
            prefix = f"{name}." if name else ""
            found[name] = sum(found.get(f"{prefix}{child}", 0.0) for child, _ in module.named_children())
    return found

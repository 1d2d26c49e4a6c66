"""Memory and values for a model on the meta device, module by module, as its configuration says."""

from __future__ import annotations

import sys
import time
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsgraph.partitioning.initialization.materialize import materialize
from dsgraph.ranks.first_rank import print_notes
from dsgraph.utils.errors import ConfigError

from .monitoring.memory_breakdown import peak_bytes, status_bytes

MOMENT = 2.0
"""Seconds after which a bar appears."""
_WIDTH = 40  # characters


class ProgressBar:
    """A progress bar on stderr, for work that takes more than a moment."""

    def __init__(self, doing: str) -> None:
        """Create a bar at 0."""
        self._doing, self._started, self._shown = doing, time.perf_counter(), -1

    def __call__(self, done: int, count: int) -> None:
        """Show how many of `count` parameters are done; the bar is drawn once for each of its characters."""
        full = _WIDTH * done // max(count, 1)
        if time.perf_counter() - self._started < MOMENT or full == self._shown:
            return
        self._shown = full
        bar = (
            f"\rdsgraph: {self._doing} [{'#' * full:{_WIDTH}}] {done / 1e6:.1f} of {count / 1e6:.1f} million parameters"
        )
        print(bar, end="\n" if done == count else "", file=sys.stderr, flush=True)


def is_on_meta(model: nn.Module) -> bool:
    """Return whether some tensor of a model has no memory."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_weights(model: nn.Module, weights: Any, *, is_parallel: bool) -> None:
    """Refuse weights that cannot be read, or sharded, before anything is changed.

    Raises:
        ConfigError: Names the argument.
    """
    if is_on_meta(model):
        if is_parallel:
            raise ConfigError(
                "initialize: the section parallel takes no model on the meta device yet: build the model on the CPU"
            )
        if weights is not None and not isinstance(weights, str | PathLike):
            raise ConfigError(f"initialize: weights is {weights!r}; it takes a folder of *.safetensors")
    elif weights is not None:
        raise ConfigError(
            "initialize: weights is for a model on the meta device, and this one has values: leave it out, and call "
            "engine.load_pretrained(folder)"
        )


def give_values(model: nn.Module, device: torch.device, weights: Any) -> None:
    """Give a model memory and values, with a progress bar on the first rank, and print the memory used.

    Args:
        model: The partitioned model.
        device: The device of tensors that stay in memory.
        weights: A folder of safetensors; None: modules initialise themselves.

    Raises:
        PartitionError: See `materialize`.
    """
    if not is_on_meta(model):
        return
    is_first, doing = dist.get_rank() == 0, "initialising" if weights is None else f"reading {weights}"
    before, started = status_bytes("VmRSS"), time.perf_counter()
    materialize(model, device, weights=weights, progress=ProgressBar(doing) if is_first else None)
    model.to(device)  # buffers that had values
    count = sum(param.numel() for param in model.parameters())
    most = peak_bytes(torch.device("cpu"))
    print_notes(
        f"{doing} {count / 1e6:.1f} million parameters took {time.perf_counter() - started:.1f} s and at most "
        f"{max(0, most - before) / 1e6:.0f} MB of memory above the {before / 1e6:.0f} MB that there were"
    )

"""The ranks of an example: starting them, and what a training loop asks of them."""

from __future__ import annotations

import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from dsgraph.launch.script import Script, run_script


def started_by_torchrun() -> bool:
    return "RANK" in os.environ


def start(module: str, arguments: list[str], *, count: int) -> None:
    """Run `python -m module arguments` on `count` ranks of this machine, and end this process as they end."""
    try:
        sys.exit(run_script(Script(("-m", module)), arguments, nproc=count, environment={}))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells do for Ctrl-C; the ranks have been ended


def refuse(message: str) -> NoReturn:
    """End this process over a wrong argument, with one line from the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
    sys.exit(2)


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks, and the device that it has to itself."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def join(cls, *, alone: bool) -> Place:
        """Join the ranks that torchrun has started, or a group of this process `alone`.

        NCCL when this machine has a GPU for each of its ranks, gloo otherwise.
        """
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, not in the middle of a collective
        number, count = (0, 1) if alone else (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        device = torch.device("cuda", number) if torch.cuda.device_count() >= count else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        rendezvous = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **rendezvous)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def say(self, text: str) -> None:
        """One line on stdout, from the first rank alone, in place of what `show` has shown."""
        self.show("")
        if self.rank == 0:
            print(text, flush=True)

    @property
    def is_watched(self) -> bool:
        """True on the first rank, in a terminal."""
        return self.rank == 0 and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """A line in a terminal that stays until the next one; nothing elsewhere."""
        if self.is_watched:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def mean(self, value: torch.Tensor) -> float:
        """Return the mean over all ranks of a scalar tensor; waits for the device."""
        value = value.detach().double() / self.world
        dist.all_reduce(value)
        return value.item()

    def highest(self, value: float) -> float:
        """Return the highest of all ranks' values."""
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()

    def peak_mb(self) -> float:
        """Return the most memory that this rank has used so far: of its GPU, or of its process where there is none.

        MB.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e6
        if sys.platform == "linux":  # where `getrusage` counts the program that started this one as well
            (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024 / 1e6
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
        return used / 1e6 if sys.platform == "darwin" else used * 1024 / 1e6

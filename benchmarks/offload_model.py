"""Offloading against what is known of it: predicted memory of each tier, and numbers of one process in memory."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dsgraph
from benchmarks.memory import AllocationCounter, build_counter, process_bytes
from benchmarks.report import MB, Check, Row
from benchmarks.workers import Workers
from dsgraph.inductor_ext.transfers.buffer_pool import rounded
from dsgraph.offload.stored_rows import stored_rows
from dsgraph.optim.disk_optimizer import DiskOptimizer
from examples.gpt import GPT, GPTConfig

SIZES = {"width": 512, "layers": 10}  # 32 million parameters
SMALL = {"width": 128, "layers": 2}
RATIOS = (1.0, 0.5, 0.1)
STEPS = 4
WARM_UP = 2  # of them: the first one compiles, pools of buffers are as large as ever after the second
TENTH = 0.1
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "262144"}
"""Environment in which freed memory is returned to the system, see docs/guides/larger-than-memory.md."""
_TIERS = {"memory": ("predicted_mb", "counted_mb"), "disk": ("predicted_disk_mb", "disk_mb")}


class Training:
    """One rank's training of a GPT on random tokens, of which each rank takes its rows."""

    def __init__(
        self, sizes: dict[str, int], offload: dict[str, Any] | None, counter: Path | None, beside_backward: bool = False
    ) -> None:
        """Build the model and its optimizer.

        Args:
            sizes: Width and layers.
            offload: For `partition`.
            counter: From `build_counter`; None where nothing is counted.
            beside_backward: Whether the optimizer steps while the backward runs.
        """
        self._beside_backward = beside_backward
        self._before = process_bytes("VmRSS")
        self._counter = AllocationCounter(counter) if counter is not None else None
        torch.manual_seed(0)
        config = GPTConfig(width=sizes["width"], heads=sizes["width"] // 64, layers=sizes["layers"])
        model = GPT(config)
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        self.model = dsgraph.partition(model, stage=3, offload=offload)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer = optimizer if offload is None else dsgraph.offload_optimizer(optimizer, self.model)
        self._compiled: Any = torch.compile(self.model, backend="dsgraph", options={"codegen": "eager"})

    def train(self) -> dict[str, Any]:
        """Return some steps; the last loss, the parameters, and what memory and disk had to hold."""
        generator = torch.Generator().manual_seed(0)
        loss = torch.zeros(())
        for step in range(STEPS):
            if step == WARM_UP and self._counter is not None:
                self._counter.reset_peak()
            tokens = torch.randint(0, 256, (2, 257), generator=generator)
            own = tokens.chunk(dist.get_world_size())[dist.get_rank()]
            loss = self._compiled(own[:, :-1].contiguous(), own[:, 1:].contiguous())
            optimizer = self.optimizer
            beside = isinstance(optimizer, DiskOptimizer) and self._beside_backward
            with optimizer.beside_backward() if beside else nullcontext():  # type: ignore[attr-defined]
                loss.backward()
            optimizer.step()
            self.optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found = {"loss": (mean / dist.get_world_size()).item()}
        return {**found, **self._held()} if self._counter is not None else {**found, "parameters": self._parameters()}

    def _parameters(self) -> list[torch.Tensor]:
        return [param.detach().full_tensor() for param in self.model.parameters()]  # type: ignore[attr-defined]

    def _held(self) -> dict[str, float]:
        optimizer, memory = self.optimizer, dsgraph.report(self.model).memory
        assert isinstance(optimizer, DiskOptimizer) and memory is not None and self._counter is not None
        places = [stored_rows(param.to_local()) for param in self.model.parameters()]  # type: ignore[attr-defined]
        pools = {id(place.file): place.file for place in places if place is not None}
        kept = sum(rounded(chunk.size) for chunk in optimizer.chunks) - optimizer.disk_bytes  # the allocator's
        buffers = optimizer.buffer_bytes - kept + sum(file.buffer_bytes for file in pools.values())
        files = optimizer.disk_bytes + sum(sum(file.sizes) for file in pools.values())
        return {
            "predicted_mb": memory.peak / MB,
            "counted_mb": (self._counter.peak + buffers) / MB,
            "predicted_disk_mb": sum(memory.below["disk"].values()) / MB,
            "disk_mb": files / MB,
            "grown_mb": (process_bytes("VmHWM") - self._before) / MB,
        }


def against_the_model(folder: str, *, quick: bool) -> tuple[list[Row], list[Check]]:
    """Return the rows, and what they are to reach."""
    all_on_disk = {"optimizer": "disk", "parameters": "disk", "folder": folder}
    rows, checks = [], []
    with tempfile.TemporaryDirectory() as counting:
        counter = build_counter(Path(counting))
        for beside, ratio in product((False, True), RATIOS if counter is not None else ()):
            case = f"{'during' if beside else 'after'} the backward, ratio {ratio:g}"
            offload = {**all_on_disk, "ratio": ratio}
            found = _train(case, SMALL if quick else SIZES, offload, counter, beside, world=1)
            rows.append({"case": case, **found})
            checks += [_check(f"{tier}, {case}", found, *names) for tier, names in _TIERS.items()]
    one = _train("memory", SMALL, None, None, world=1)
    two = _train("half", SMALL, {**all_on_disk, "ratio": TENTH}, None, world=2)
    pairs = zip(one.pop("parameters"), two.pop("parameters"), strict=True)
    furthest = max((a - b).abs().max().item() for a, b in pairs)
    rows += [{"case": "one process, in memory", **one}, {"case": "2 ranks, a tenth on disk", **two}]
    checks.append(Check("2 ranks against one process: largest parameter difference", furthest, 1e-6, "lower"))
    checks.append(Check("2 ranks against one process: loss difference", abs(one["loss"] - two["loss"]), 1e-6, "lower"))
    return rows, checks


def _check(what: str, found: Row, predicted: str, measured: str) -> Check:
    error = abs(found[predicted] / found[measured] - 1)
    return Check(f"{what}: predicted over measured, minus 1", error, TENTH, "lower")


def _train(
    name: str, sizes: dict[str, int], offload: Any, counter: Path | None, beside: bool = False, *, world: int
) -> dict[str, Any]:
    arguments = (sizes, offload, counter, beside)
    with Workers(name, Training, *arguments, world=world, environ=ENVIRONMENT) as group:
        return dict(group.call("train")[0])

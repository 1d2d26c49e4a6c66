"""DeepSpeed's own offload beside ours, wherever DeepSpeed starts: a GPT of 32 million parameters, stage 3, one rank.

Each case runs in a process of its own, with a limit of time. One that fails, or that takes longer, is a row with what
it did, so that the benchmark always ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim

import dsgraph
from benchmarks.memory import process_bytes
from benchmarks.offload_model import ENVIRONMENT, SIZES, SMALL
from benchmarks.report import MB, Row
from dsgraph.optim.disk_optimizer import DiskOptimizer
from examples.gpt import GPT, GPTConfig

CASES = ("deepspeed-host", "deepspeed-disk", "dsgraph-host", "dsgraph-disk")
LIMIT = 600  # seconds of a case: DeepSpeed builds its operators in the first one, which takes minutes
_STEPS = 5
_BATCH, _TIME = 2, 256
_TAIL = 200  # characters of an error that a row holds

Step = Callable[[Tensor, Tensor], Tensor]


def peer_rows(folder: str, *, quick: bool) -> list[Row]:
    """Return a row a case."""
    return [_apart(case, folder, quick=quick) for case in CASES]


def run_case(case: str, folder: str, *, quick: bool) -> Row:
    """Train in this process, and return its row."""
    system, _, tier = case.partition("-")
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    sizes = SMALL if quick else SIZES
    before = process_bytes("VmRSS")
    config = GPTConfig(width=sizes["width"], heads=sizes["width"] // 64, layers=sizes["layers"])
    model = GPT(config)
    count = sum(param.numel() for param in model.parameters())
    step = (_deepspeed if system == "deepspeed" else _dsgraph)(model, tier, folder)
    generator = torch.Generator().manual_seed(0)
    seconds, loss = [], torch.zeros(())
    for _ in range(_STEPS):
        tokens = torch.randint(0, 256, (_BATCH, _TIME + 1), generator=generator)
        begun = time.perf_counter()
        loss = step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        seconds.append(time.perf_counter() - begun)
    grown = process_bytes("VmHWM") - before
    sizes_mb = {"states_mb": 16 * count / MB, "grown_mb": grown / MB}
    return {**_named(case), **sizes_mb, "step_s": statistics.median(seconds[2:]), "loss": loss.item()}


def _named(case: str) -> Row:
    system, _, tier = case.partition("-")
    return {"case": case, "system": system, "tier": tier}


def _apart(case: str, folder: str, *, quick: bool) -> Row:
    if case.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return {**_named(case), "error": "deepspeed is not installed: the extra `peers` has it"}
    command = [sys.executable, "-m", "benchmarks.offload", "--case", case, "--folder", folder]
    environ = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    # DeepSpeed builds operators, by ninja of its own environment.
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(
            [*command, *(["--quick"] if quick else [])],
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)  # the compilers that it started as well
        said.seek(0)
        text = said.read()
    if code == 0:
        return dict(json.loads(text.splitlines()[-1]))
    what = f"no end within {LIMIT} s" if code is None else f"exit code {code}"
    return {**_named(case), "error": f"{what}: {text.strip()[-_TAIL:]}"}


def _end(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _deepspeed(model: GPT, tier: str, folder: str) -> Step:
    """With the bucket sizes that transformers derives from the model's width; its Adam of C++, built at first use."""
    import deepspeed

    width = model.config.width
    where: dict[str, Any] = {"device": "cpu"} if tier == "host" else {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": _BATCH,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": where,
            "offload_param": where if tier == "host" else {**where, "buffer_size": 2 * 4 * width**2},
            "reduce_bucket_size": width**2,
            "stage3_prefetch_bucket_size": int(0.9 * width**2),
            "stage3_param_persistence_threshold": 10 * width,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _dsgraph(model: GPT, tier: str, folder: str) -> Step:
    offload = {"optimizer": tier, "parameters": tier, **({"folder": folder} if tier == "disk" else {})}
    dsgraph.partition(model, stage=3, offload=offload)
    made = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    optimizer = dsgraph.offload_optimizer(made, model)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = compiled(tokens, targets)
        with optimizer.beside_backward() if isinstance(optimizer, DiskOptimizer) else nullcontext():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step

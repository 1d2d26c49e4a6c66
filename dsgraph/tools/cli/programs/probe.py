"""The checks of `dsgraph doctor` that load torch.

They run in a process of their own, because they may crash or hang. One JSON object a line.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

from dsgraph.launch.pool import Pool
from dsgraph.utils.errors import on_one_line

REQUIRED = ("numpy", "networkx", "sympy", "tabulate", "pydantic", "typing_extensions")
_TIMEOUT = 8  # seconds


def main() -> None:
    """Make one check after the other."""
    sys.stdout = sys.stderr  # what packages print when they are imported is no part of the answer
    for package in REQUIRED:
        _report(package, partial(_imported, package))
    if _report("torch", _torch):
        _report("two ranks", two_ranks)  # before CUDA is initialised, after which one cannot fork
        _report("process groups", _process_groups)
        _report("devices", _devices)
        _report("dsgraph", _dsgraph)
        _report("torch.compile", _registered)
        if sys.platform == "linux":
            _report("triton", partial(_imported, "triton"))


def two_ranks() -> str:
    """Sum over a gloo group of two processes.

    Raises:
        RuntimeError: They do not finish in time, or with the wrong sum.
    """
    # A fork shares the torch that is loaded; on macOS forking after loading frameworks is unsafe.
    with tempfile.TemporaryDirectory(prefix="dsgraph-doctor-") as folder:
        pool = Pool(_sum, str(Path(folder) / "store"), method="fork" if sys.platform == "linux" else "spawn")
        try:
            answers = pool.start(2, limit=_TIMEOUT, grace=_TIMEOUT)
        finally:
            pool.stop()
    if answers.errors:
        raise RuntimeError(next(iter(answers.errors.values())).strip().rpartition("\n")[2])
    if not answers.are_complete:
        raise RuntimeError(f"two processes did not meet within {_TIMEOUT} s")
    return "a sum over two processes is right"


def _sum(rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=_TIMEOUT - 2)
    )
    value = torch.tensor(rank + 1.0)
    dist.all_reduce(value)
    if value.item() != 3.0:
        raise RuntimeError(f"the sum is {value.item()}")
    dist.destroy_process_group()


def _imported(package: str) -> str:
    return str(getattr(importlib.import_module(package), "__version__", "present"))


def _torch() -> str:
    import torch

    if torch.version.cuda:
        return f"{torch.__version__}, CUDA {torch.version.cuda}"
    return f"{torch.__version__}, {'ROCm ' + torch.version.hip if torch.version.hip else 'for CPUs'}"


def _process_groups() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, is_there in there.items() if is_there]


def _devices() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        f"{torch.cuda.get_device_name(index)}, {torch.cuda.get_device_properties(index).total_memory / 2**30:.0f} GiB"
        for index in range(count)
    ]


def _dsgraph() -> str:
    found = importlib.import_module("dsgraph")
    importlib.import_module("dsgraph.api")
    return f"{found.__version__} in {Path(str(found.__file__)).parent}"


def _registered() -> str:
    import torch

    names = torch.compiler.list_backends()
    if "dsgraph" not in names:
        raise RuntimeError(f"backend 'dsgraph' is not registered; there are {', '.join(names)}")
    return "finds backend 'dsgraph'"


def _report(name: str, check: Callable[[], object]) -> bool:
    try:
        line = {"name": name, "found": check(), "problem": None}
    except BaseException as error:  # a package may end the process that imports it
        line = {"name": name, "found": None, "problem": on_one_line(error)}
    os.write(1, (json.dumps(line) + "\n").encode())
    return line["problem"] is None

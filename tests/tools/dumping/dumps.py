"""Dumps for tests: as rank after rank of a group whose other ranks do not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import dsgraph
from dsgraph.tools.dumping.records import CompileRecord, GraphRecord
from dsgraph.utils.json_records import from_json_text
from tests.models import build, tokens


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    torch._dynamo.reset()
    try:
        yield
    finally:
        dist.destroy_process_group()


def dump(
    folder: Path,
    make: Callable[[], nn.Module] = lambda: build("gpt"),
    batch: Sequence[Tensor] | None = None,
    *,
    rank: int = 0,
    world: int = 2,
    stage: int = 3,
    **options: Any,
) -> Path:
    """Dumps one training step as one rank of a group of fake ranks; returns the folder of its first compile."""
    with as_rank(rank, world):
        torch.manual_seed(0)
        model = dsgraph.partition(make(), stage=stage, keep_whole_below=100)
        backend = dsgraph.api.new_backend()  # of its own, as another process would have
        compiled = torch.compile(model, backend=backend, options={"codegen": "eager", "dump": folder, **options})
        compiled(*(tokens(0, 0) if batch is None else batch)).backward()
    return folder / f"rank{rank}" / "compile1"


def read(place: Path, graph: str) -> GraphRecord:
    return from_json_text(GraphRecord, (place / f"{graph}.json").read_bytes())


def manifest(place: Path) -> CompileRecord:
    return from_json_text(CompileRecord, (place / "compile.json").read_bytes())

"""Ranks save one checkpoint under one tag, or get an error at once that names the rank that differs."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsgraph
from tests.engine.training import config

pytestmark = pytest.mark.distributed


def _engine(stage: int, *, compiles: bool = False, **more: Any) -> dsgraph.Engine:
    torch.manual_seed(0)
    settings = config(stage, dsgraph={"compile": compiles, "codegen": "eager"}, **more)
    return dsgraph.initialize(model=nn.Linear(8, 4), config=settings)[0]


def _step(engine: dsgraph.Engine) -> None:
    engine.backward(engine(torch.ones(2, 8)).mean())
    engine.step()


def _names(folder: str) -> list[str]:
    dist.barrier()
    return sorted(path.name for path in Path(folder).iterdir())


def _tags(folder: str) -> None:
    rank, (first, other) = dist.get_rank(), (_engine(1), _engine(1, checkpoint={"tag_validation": "FAIL"}))
    with pytest.raises(dsgraph.CheckpointError, match="the tag is 'tag0' on rank 0 and 'tag1' on rank 1: it must be"):
        other.save_checkpoint(folder, f"tag{rank}")
    with pytest.raises(dsgraph.CheckpointError, match=r"save_dir is '.*/0' on rank 0 and '.*/1' on rank 1"):
        first.save_checkpoint(f"{folder}/{rank}")
    with pytest.raises(dsgraph.CheckpointError, match="asynchronous is True on rank 0 and False on rank 1"):
        first.save_checkpoint(folder, asynchronous=rank == 0)
    assert _names(folder) == []
    with contextlib.redirect_stdout(io.StringIO()) as said:
        first.save_checkpoint(folder, f"tag{rank}")
    assert ("all take 'tag0'" in said.getvalue()) == (rank == 0)
    assert _names(folder) == ["latest", "tag0"]
    assert first.load_checkpoint(folder)[0] == f"{folder}/tag0"


def test_one_tag_for_all_ranks(ranks, tmp_path):
    ranks(2).run(_tags, str(tmp_path))


def _alone(folder: str, stage: int, compiles: bool) -> str:
    engine, began = _engine(stage, compiles=compiles), 0.0
    _step(engine)
    _step(engine)
    with pytest.raises(dsgraph.RanksDisagreeError) as said:
        began = time.monotonic()
        engine.save_checkpoint(folder) if dist.get_rank() == 0 else _step(engine)
    assert time.monotonic() - began < 10
    return str(said.value)


@pytest.mark.parametrize(("stage", "compiles"), [(3, True), pytest.param(0, False, marks=pytest.mark.full), (1, False)])
def test_a_rank_that_saves_while_others_train_is_named_at_once(ranks, tmp_path, stage, compiles):
    for said in ranks(2).run(_alone, str(tmp_path), stage, compiles):
        assert "rank 0 waits until all ranks say that they save_checkpoint, rank 1 " in said, said
        assert "All ranks must save and load checkpoints at the same point" in said
    assert list(tmp_path.iterdir()) == []

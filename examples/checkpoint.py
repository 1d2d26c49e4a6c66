"""Checkpoints that any number of ranks can write and any other number can read, and that no interruption destroys.

A folder holds two slots, `a` and `b`, and a file `latest` that names one of them. A save fills the other slot and then
replaces `latest` in one move of the file system: until then, the last good checkpoint is the latest one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


@dataclass(frozen=True)
class Latest:
    """The content of the file `latest`: the slot, the steps done, their last loss, and the sizes of the model."""

    slot: str
    step: int
    loss: float
    sizes: dict[str, Any]


def read_latest(folder: Path) -> Latest | None:
    """Return the latest checkpoint in `folder`; None when there is none."""
    try:
        return Latest(**json.loads((folder / "latest").read_text()))
    except FileNotFoundError:
        return None


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    loss: float,
    sizes: dict[str, Any],
) -> None:
    """Write model and optimizer, each rank its own shards. All ranks call it at the same point."""
    before = read_latest(folder)
    slot = "b" if before is not None and before.slot == "a" else "a"
    if dist.get_rank() == 0:
        shutil.rmtree(folder / slot, ignore_errors=True)
        (folder / slot).mkdir(parents=True)
    dist.barrier()
    dcp.save(_state(model, optimizer), checkpoint_id=folder / slot)
    if dist.get_rank() == 0:
        text = json.dumps(asdict(Latest(slot, step, loss, sizes)))
        (folder / "latest.new").write_text(text + "\n")
        (folder / "latest.new").replace(folder / "latest")
    dist.barrier()  # the next save reads `latest` again


def load(folder: Path, latest: Latest, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into model and optimizer, whatever number of ranks wrote it."""
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder / latest.slot)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}

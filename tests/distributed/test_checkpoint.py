"""A checkpoint of one number of ranks can be loaded on another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dsgraph
from tests.distributed.training import full
from tests.models import build, tokens

pytestmark = pytest.mark.distributed


def _model(stage: int, case: str):
    model = dsgraph.partition(build(case), stage=stage, keep_whole_below=20)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def _state(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _batch(case: str, step: int):
    from tests.models import CASES

    return CASES[case].batches(step, 0)  # the same on every rank: results do not depend on the number of ranks


def _train_and_save(folder: Path, stage: int, case: str) -> dict[str, torch.Tensor]:
    model, optimizer = _model(stage, case)
    for step in range(2):
        model(*_batch(case, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    return _go_on(model, optimizer, case)


def _load(folder: Path, stage: int, case: str) -> dict[str, torch.Tensor]:
    model, optimizer = _model(stage, case)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return _go_on(model, optimizer, case)


def _go_on(model, optimizer, case: str) -> dict[str, torch.Tensor]:
    model(*_batch(case, 7)).backward()
    optimizer.step()
    return {name: full(param).detach() for name, param in model.named_parameters()}


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", (0, 1, 3))
@pytest.mark.parametrize("case", ("gpt", "uneven"))
def test_save_on_two_ranks_and_load_on_any_number(ranks, tmp_path, stage, case):
    saved = ranks(2).run(_train_and_save, tmp_path, stage, case)[0]
    for world in (1, 2, 3):
        loaded = ranks(world).run(_load, tmp_path, stage, case)[0]
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            torch.testing.assert_close(loaded[name], value)


def test_another_stage_loads_it(ranks, tmp_path):
    saved = ranks(2).run(_train_and_save, tmp_path, 3, "gpt")[0]
    for stage in (0, 1):
        loaded = ranks(2).run(_load, tmp_path, stage, "gpt")[0]
        for name, value in saved.items():
            torch.testing.assert_close(loaded[name], value)


def _compare_keys() -> None:
    model, _ = _model(3, "tied")
    assert list(model.state_dict()) == list(build("tied").state_dict())
    assert dist.get_world_size() == 2
    assert tokens(0, 0)


def test_keys_are_unchanged(ranks):
    ranks(2).run(_compare_keys)

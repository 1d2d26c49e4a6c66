"""A ZeRO checkpoint that DeepSpeed 0.19.8 made goes on here; nothing that such a file holds is run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dsgraph
from dsgraph.checkpoint.convert import import_checkpoint
from dsgraph.checkpoint.deepspeed_files import _read_groups
from dsgraph.tools.cli.main import main
from tests.models import build

from .make_deepspeed_checkpoints import CASE, FOLDER, MORE, SAVED, config, losses


def _go_on(folder: str, stage: int) -> list[float]:
    settings = {**config(stage), "dsgraph": {"codegen": "eager"}}
    engine, *_ = dsgraph.initialize(model=build(CASE), config=settings)
    path, client = engine.load_checkpoint(folder)
    assert path is not None and client == {"seen": SAVED}
    assert engine.global_steps == SAVED and engine.is_gradient_accumulation_boundary() is False
    found = losses(engine, SAVED, SAVED + MORE)
    engine.close()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), pytest.param(2, 1, marks=pytest.mark.full), (3, 2)])
def test_it_goes_on_as_deepspeed_did(ranks, tmp_path, saved, loaded):
    expected = json.loads((FOLDER / f"stage{saved}.json").read_text())
    path, said = import_checkpoint(FOLDER / f"stage{saved}", tmp_path, tag=None)
    assert path == tmp_path / f"global_step{SAVED}" and said["steps"] == SAVED
    found = ranks(2).run(_go_on, str(tmp_path), loaded)[0]
    assert found == pytest.approx(expected, abs=1e-4)


class _Harmful:
    """An object whose pickle runs code."""

    def __reduce__(self):
        return (Path.touch, (Path("harmed"),))


def test_nothing_else_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "stage2"
    shutil.copytree(FOLDER / "stage2", source)
    file = source / "mp_rank_00_model_states.pt"
    about = torch.load(file, weights_only=True)
    torch.save({**about, "client": _Harmful()}, file)
    assert main(["import", str(source), str(tmp_path / "out")]) == 2
    assert "mp_rank_00_model_states.pt holds a " in capsys.readouterr().err
    assert not Path("harmed").exists() and not Path("out").exists()
    file.write_bytes(file.read_bytes()[:1000])
    assert main(["import", str(source), str(tmp_path / "out")]) == 2
    assert "mp_rank_00_model_states.pt is damaged" in capsys.readouterr().err
    next(source.glob("*rank_1_*optim*")).unlink()
    assert main(["import", str(source), str(tmp_path / "out")]) == 2
    assert "2 ranks wrote it, and the file of rank 1 is missing" in capsys.readouterr().err
    assert main(["import", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "holds neither *.safetensors nor a ZeRO checkpoint" in capsys.readouterr().err
    assert not dist.is_initialized()


def test_what_stands_between_parameters_of_a_flat_group_is_left_out():
    flat = torch.tensor([1.0, 2.0, -1.0, 3.0, 4.0, 5.0, -1.0, -1.0])  # two ranks' halves, of two groups' one
    shapes = [{"a": torch.Size([2]), "b": torch.Size([3, 1])}]
    found = dict(_read_groups([[flat[:4]], [flat[4:]]], shapes, paddings=[[1, 2]]))
    assert found["a"].tolist() == [1, 2] and found["b"].tolist() == [[3], [4], [5]]

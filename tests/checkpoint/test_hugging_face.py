"""Weights out to Hugging Face's files and in from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import dsgraph
from dsgraph.checkpoint.convert import import_checkpoint
from dsgraph.checkpoint.weight_files import INDEX, WeightFiles
from dsgraph.tools.cli.main import main
from tests.distributed.training import full
from tests.engine.training import config

pytestmark = pytest.mark.distributed

SHARD = 20_000


def _llama(seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=True, **sizes))


def _engine(seed: int, stage: int) -> dsgraph.Engine:
    settings = {**config(stage), "dsgraph": {"compile": False}}
    return dsgraph.initialize(model=_llama(seed), config=settings)[0]


def _logits(engine: dsgraph.Engine) -> torch.Tensor:
    engine.eval()
    with torch.no_grad():
        return engine(torch.arange(12).view(2, 6)).logits


def _out_and_in(folder: str) -> torch.Tensor:
    first, second = _engine(0, 3), _engine(1, 2)
    expected = _logits(first)
    assert not torch.allclose(_logits(second), expected)
    first.export(f"{folder}/export", shard_bytes=SHARD)
    with pytest.raises(dsgraph.CheckpointError, match=r"rank 0: .*export is not empty"):
        first.export(f"{folder}/export")
    dist.barrier()
    if dist.get_rank() == 0:  # an older file, which the index does not name
        save_file({"model.norm.weight": torch.zeros(32)}, f"{folder}/export/model.safetensors")
    dist.barrier()
    second.load_pretrained(f"{folder}/export")
    assert torch.allclose(_logits(second), expected, atol=1e-6)
    first.save_checkpoint(f"{folder}/checkpoints", "mine")
    return expected


def _import(folder: str) -> torch.Tensor:
    engine = _engine(2, 1)
    engine.load_checkpoint(folder, load_module_only=True)
    return _logits(engine)


def test_transformers_loads_what_was_exported(ranks, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    expected = ranks(2).run(_out_and_in, str(tmp_path))[0]
    exported, again = tmp_path / "export", tmp_path / "again"
    import_checkpoint(exported, tmp_path / "imported", tag="base")
    (exported / "model.safetensors").unlink()
    assert main(["export", str(tmp_path / "checkpoints"), str(again), "--shard", f"{SHARD // 1000}KB", "--json"]) == 0
    assert "model-00001-of-0000" in json.loads(capsys.readouterr().out)["files"][2]
    for folder in (exported, again):
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) > 2 and all(file.stat().st_size < 1.5 * SHARD for file in files)
        assert set(json.loads((folder / INDEX).read_text())["weight_map"].values()) == {file.name for file in files}
        assert "lm_head.weight" not in {name for file in files for name in load_file(file)}, "it is tied"
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            assert torch.allclose(model(torch.arange(12).view(2, 6)).logits, expected, atol=1e-6)
    assert torch.allclose(ranks(2).run(_import, str(tmp_path / "imported"))[0], expected, atol=1e-6)
    assert main(["export", str(tmp_path), str(tmp_path / "none")]) == 2
    assert "is no checkpoint of an engine" in capsys.readouterr().err


def _plain(folder: str) -> None:
    torch.manual_seed(dist.get_rank())
    make = lambda: nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))  # noqa: E731
    first = dsgraph.initialize(model=make(), config={**config(3), "dsgraph": {"compile": False}})[0]
    first.export(f"{folder}/half", dtype=torch.bfloat16)
    dist.barrier()
    found = load_file(f"{folder}/half/model.safetensors")
    for name, value in first.module.state_dict().items():
        whole = full(value)
        assert torch.equal(found[name], whole.bfloat16() if whole.is_floating_point() else whole), name
    second = dsgraph.initialize(
        model=nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)),
        config={**config(0), "dsgraph": {"compile": False}},
    )[0]
    before = full(second.module[0].weight.detach()).clone()
    with pytest.raises(dsgraph.CheckpointError, match=r"'2.weight' is \[3, 5\] in it and \[4, 5\] in the model"):
        second.load_pretrained(f"{folder}/half")
    assert torch.equal(full(second.module[0].weight.detach()), before)
    with pytest.raises(dsgraph.CheckpointError, match=r"there are no \*.safetensors in it"):
        second.load_pretrained(folder)


def test_other_models_and_dtypes(ranks, tmp_path):
    ranks(2).run(_plain, str(tmp_path))
    assert sorted(path.name for path in Path(tmp_path / "half").iterdir()) == ["model.safetensors"]


def test_files_are_filled_in_order():
    files = WeightFiles.plan({"a": 3, "b": 4, "c": 9, "d": 1}, limit=7)
    assert files.names == (("a", "b"), ("c",), ("d",)) and files.bytes == 17
    assert files.file(1) == "model-00002-of-00003.safetensors"
    assert WeightFiles.plan({"a": 3}, limit=7).file(0) == "model.safetensors"

"""Checkpoints of which each rank of an engine reads its slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import dsgraph
from dsgraph.utils.errors import InferenceError
from tests.inference.families import CONFIGS, model, prompt

pytestmark = pytest.mark.distributed

EAGER = {"codegen": "eager"}


def _on_meta(family: str) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())


def _reads(folder: Path, family: str) -> None:
    expected = model(family, seed=1).generate(**prompt(2, 6), max_new_tokens=6, do_sample=False)
    engine = dsgraph.init_inference(_on_meta(family), mp_size=2, checkpoint=folder, max_tokens=32, options=EAGER)
    assert torch.equal(engine.generate(**prompt(2, 6), max_new_tokens=6, do_sample=False), expected)
    held = sum(param.to_local().numel() for param in engine.module.parameters())
    full = sum(param.numel() for param in engine.module.parameters())
    assert held < 0.75 * full, "the slices alone"


@pytest.mark.full  # test_sliced_few_bits.py reads files, and tests/inference/test_checkpoints.py such files
@pytest.mark.parametrize("family", ["gpt2", *[pytest.param(n, marks=pytest.mark.full) for n in CONFIGS if n != "gpt2"]])
def test_sharded_files_of_transformers(ranks, tmp_path, family):
    model(family, seed=1).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ranks(2).run(_reads, tmp_path, family)


def _train_and_read(folder: Path, config: dict[str, Any], family: str) -> None:
    mine = model(family, seed=1)
    example = {"input_ids": torch.ones(2, 8, dtype=torch.long), "use_cache": False}
    rest = {"example": example} if "parallel" in config else {}
    engine, *_ = dsgraph.initialize(model=mine, config=config, **rest)
    engine.save_checkpoint(folder)
    dist.barrier()
    _reads(folder, family)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [pytest.param(n, marks=pytest.mark.full) for n in (0, 1, 2)] + [3])
def test_checkpoints_of_the_training_engine(ranks, tmp_path, stage, family):
    config = {
        **{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    ranks(2).run(_train_and_read, tmp_path, config, family)


def _lacks(folder: Path) -> None:
    with pytest.raises(
        InferenceError, match=r"'transformer.wte.weight' of checkpoint=.* is \[96, 32\], and \[97, 32\]"
    ):
        config = CONFIGS["gpt2"]()
        config.vocab_size = 97
        other = transformers.AutoModelForCausalLM.from_config(config)
        dsgraph.init_inference(other, mp_size=2, checkpoint=folder, options=EAGER)
    with pytest.raises(InferenceError, match=r"has no 'model.embed_tokens.weight'"):
        dsgraph.init_inference(model("llama"), mp_size=2, checkpoint=folder, options=EAGER)


def test_files_of_another_model_are_refused(ranks, tmp_path):
    model("gpt2").save_pretrained(tmp_path)
    ranks(2).run(_lacks, tmp_path)

"""Slices of weights as files hold them: fused ones, those of experts, those in several files."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsgraph.inductor_ext import slice_of
from dsgraph.inference.weight_sources import find, open_source
from dsgraph.passes.parallel.slices import Slice
from dsgraph.utils.errors import InferenceError
from tests.inference.families import model


def _read(folder: Path, name: str, held: Slice | None, rank: int, count: int) -> torch.Tensor:
    with ExitStack() as stack:
        return open_source(folder, stack).read(name, held, rank, count)


@pytest.mark.parametrize("count", [2, 4])
def test_of_queries_keys_and_values_in_one_weight_each_rank_reads_its_heads(tmp_path, count):
    plain = model("gpt2")
    plain.save_pretrained(tmp_path)
    attention = plain.transformer.h[1].attn.c_attn
    for rank in range(count):
        for name, full, dim in (("weight", attention.weight, 1), ("bias", attention.bias, 0)):
            three = [piece.chunk(count, dim)[rank] for piece in full.chunk(3, dim)]
            found = _read(tmp_path, f"transformer.h.1.attn.c_attn.{name}", Slice(dim, 3), rank, count)
            assert torch.equal(found, torch.cat(three, dim))


@pytest.mark.parametrize("held", [None, Slice(1, 2), Slice(1), Slice(2), Slice(0)])
def test_weights_of_single_experts_are_read_as_those_of_all(tmp_path, held):
    plain = model("mixtral")
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    for name in ("experts.gate_up_proj", "experts.down_proj", "gate.weight"):
        if held is not None and (name == "gate.weight" or (held.parts > 1 and "down" in name)):
            continue
        full = plain.get_parameter(f"model.layers.1.mlp.{name}")
        for rank in (0, 1):
            expected = full if held is None else slice_of(full, held.dim, parts=held.parts, ranks=2, rank=rank)
            assert torch.equal(_read(tmp_path, f"model.layers.1.mlp.{name}", held, rank, 2), expected)


def test_an_index_says_which_files_count(tmp_path):
    model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "other.safetensors")
    assert float(_read(tmp_path, "model.norm.weight", None, 0, 1)[0]) == 1.0
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    lost = index["weight_map"]["model.norm.weight"]
    (tmp_path / lost).unlink()
    with pytest.raises(InferenceError, match=rf"lacks '{lost}', which model.safetensors.index.json names"):
        _read(tmp_path, "model.norm.weight", None, 0, 1)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}'])
def test_a_damaged_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InferenceError, match=r"checkpoint=.*model.safetensors.index.json is damaged"):
        _read(tmp_path, "model.norm.weight", None, 0, 1)


def test_a_damaged_file_and_a_lost_piece_of_an_expert_are_named(tmp_path):
    model("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights, lost = load_file(file), "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    kept = {name: weight.clone() for name, weight in weights.items() if name != lost}  # it is mapped
    save_file(kept, file)
    with pytest.raises(InferenceError, match=rf"checkpoint=.*there is no '{lost}'"):
        _read(tmp_path, "model.norm.weight", None, 0, 1)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(InferenceError, match=r"checkpoint=.*model.safetensors is damaged"):
        _read(tmp_path, "model.norm.weight", None, 0, 1)


def test_files_of_a_model_without_its_head_have_shorter_names(tmp_path):
    plain = model("gpt2")
    plain.transformer.save_pretrained(tmp_path)
    with ExitStack() as stack:
        source = open_source(tmp_path, stack)
        arguments = {"shape": (96, 32), "prefix": "transformer.", "folder": tmp_path}
        assert find(source, ["transformer.wte.weight"], **arguments) == "wte.weight"
        with pytest.raises(InferenceError, match=r"'wte.weight' of checkpoint=.* is \[96, 32\], and \[96, 33\]"):
            find(source, ["transformer.wte.weight"], **{**arguments, "shape": (96, 33)})

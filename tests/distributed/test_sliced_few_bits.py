"""Engines of which ranks share weights of few bits compute with the numbers of one process."""

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
SOURCES = ("the model", "its files", "files of few bits")
_LAYERS = {"gpt2": "transformer.h.1.attn.c_attn", "opt": "model.decoder.layers.1.fc2", "qwen3": "lm_head"}


def _whole(family: str, bits: int) -> Any:
    few = model(family, seed=1)
    return dsgraph.quantize(few, bits=bits, group=None if bits == 8 else _group(family))


def _group(family: str) -> int:
    return 8 if family == "qwen3" else 16


def _engine(source: str, family: str, bits: int, folder: Path) -> Any:
    others: dict[str, Any] = {"mp_size": dist.get_world_size(), "max_tokens": 32, "options": EAGER}
    if source == "the model":
        return dsgraph.init_inference(_whole(family, bits), **others)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    if source == "its files":
        return dsgraph.init_inference(empty, checkpoint=folder / "plain", quantize="int8", **others)
    return dsgraph.init_inference(empty, checkpoint=folder / "few", **others)


def _shares(family: str, bits: int, folder: Path, sources: tuple[str, ...]) -> None:
    one = _whole(family, bits)
    given = prompt(2, 6)
    expected = one.generate(**given, max_new_tokens=6, do_sample=False)
    for source in sources:
        engine = _engine(source, family, bits, folder)
        assert torch.equal(engine.generate(**given, max_new_tokens=6, do_sample=False), expected), source
        name = _LAYERS.get(family, "model.layers.1.self_attn.o_proj")
        own, full = engine.module.get_submodule(name), one.get_submodule(name)
        assert torch.equal(own.dequantized(), full.dequantized()), source
        if name != "lm_head":  # of so few words it is replicated
            assert own.packed.numel() * dist.get_world_size() == full.packed.numel(), "its slice alone"
        assert engine.report().quantization.errors == one.quantization.errors, source


def _saved(family: str, bits: int, folder: Path) -> None:
    model(family, seed=1).save_pretrained(folder / "plain")
    dsgraph.save_quantized(_whole(family, bits), folder / "few")


def test_a_rank_computes_with_its_slices_of_the_rounded_weights(ranks, tmp_path):
    _saved("gpt2", 8, tmp_path)
    ranks(2).run(_shares, "gpt2", 8, tmp_path, SOURCES[2:])


@pytest.mark.full
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_family(ranks, tmp_path, family, bits):
    _saved(family, bits, tmp_path)
    sources = SOURCES if bits == 8 else (SOURCES[0], SOURCES[2])
    ranks(2).run(_shares, family, bits, tmp_path, sources, timeout_s=200)


@pytest.mark.full
def test_four_ranks(ranks, tmp_path):
    _saved("opt", 4, tmp_path)
    ranks(4).run(_shares, "opt", 8, tmp_path, SOURCES[:1], timeout_s=200)


def _narrow() -> None:
    given = prompt(2, 9)
    exact = model("llama")(**given).logits
    options = {"max_tokens": 32, "dtype": torch.bfloat16, "options": EAGER}
    one = dsgraph.init_inference(dsgraph.quantize(model("llama")), **options)(**given).logits.float()
    two = dsgraph.init_inference(dsgraph.quantize(model("llama")), mp_size=2, **options)(**given).logits.float()
    assert (two - exact).norm() <= 1.25 * (one - exact).norm()


@pytest.mark.full
def test_bfloat16_is_as_near_as_one_process(ranks):
    ranks(2).run(_narrow)


def _compiled() -> None:
    one = dsgraph.init_inference(dsgraph.quantize(model("llama"), bits=4, group=16), max_tokens=32)
    two = dsgraph.init_inference(dsgraph.quantize(model("llama"), bits=4, group=16), mp_size=2, max_tokens=32)
    given = prompt(1, 6)
    tokens = [engine.generate(**given, max_new_tokens=6, do_sample=False) for engine in (one, two)]
    assert torch.equal(*tokens)


@pytest.mark.full
@pytest.mark.inductor
def test_inductor(ranks):
    ranks(2).run(_compiled, timeout_s=200)


def _refused(folder: Path) -> None:
    few = dsgraph.quantize(model("llama"), bits=4, group=32)
    with pytest.raises(InferenceError, match=r"'model.layers.0.self_attn.o_proj' has 1 groups of 32 inputs, which 2"):
        dsgraph.init_inference(few, mp_size=2, options=EAGER)
    few = dsgraph.quantize(model("llama"), bits=8)
    with pytest.raises(InferenceError, match="the model is quantised already: give one that is not"):
        dsgraph.init_inference(few, mp_size=2, checkpoint=folder, options=EAGER)
    engine = dsgraph.init_inference(few, mp_size=2, options=EAGER)
    with pytest.raises(InferenceError, match="the layers of this model are split over ranks"):
        dsgraph.save_quantized(engine.module, folder / "never")


@pytest.mark.full
def test_what_ranks_cannot_share_is_refused(ranks, tmp_path):
    model("llama").save_pretrained(tmp_path)
    ranks(2).run(_refused, tmp_path)

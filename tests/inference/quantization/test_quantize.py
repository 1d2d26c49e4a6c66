"""Linear layers of few bits: near to the model, as small as promised, written and read again."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dsgraph
from dsgraph.utils.errors import InferenceError
from tests.inference.families import model, prompt


@pytest.mark.parametrize(("bits", "group", "near"), [(8, None, 0.02), (4, 16, 0.15)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_get_few_bits_and_a_small_error(bits, group, near, family):
    plain, few = model(family), model(family)
    assert dsgraph.quantize(few, bits=bits, group=group) is few
    how = few.quantization
    assert len(how.errors) == (15 if family == "llama" else 9)
    assert all(0 < error < near for error in how.errors.values())
    assert how.bytes_after < how.bytes_before * (0.35 if bits == 8 else 0.45)
    given = prompt(2, 9)
    expected, found = plain(**given).logits, few(**given).logits
    assert 0 < (found - expected).norm() / expected.norm() < 8 * near


@pytest.mark.inductor
@pytest.mark.parametrize("rows", [1, 9])
def test_inductor_multiplies_with_the_packed_weights(rows):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32))
    dsgraph.quantize(layers, bits=4, group=16, skip=["1"])
    few = nn.Sequential(layers[0], *dsgraph.quantize(nn.Sequential(layers[1])))
    x = torch.randn(1, rows, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(few, backend="dsgraph")(x), few(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_model_is_written_and_read_again(bits, tmp_path):
    few = dsgraph.quantize(model("gpt2", seed=3), bits=bits, group=16 if bits == 4 else None, skip=["lm_head"])
    dsgraph.save_quantized(few, tmp_path)
    engine = dsgraph.init_inference(model("gpt2"), checkpoint=tmp_path, max_tokens=32, options={"codegen": "eager"})
    given = prompt(1, 9)
    with torch.no_grad():  # weights that are read take no gradients
        assert torch.equal(engine.module(**given).logits, few(**given).logits)
    assert engine.report().quantization == few.quantization
    assert type(engine.module.lm_head) is nn.Linear
    with pytest.raises(InferenceError, match="leave quantize= out"):
        dsgraph.init_inference(model("gpt2"), checkpoint=tmp_path, quantize="int8")
    with pytest.raises(InferenceError, match="has a layer"):
        dsgraph.init_inference(model("llama"), checkpoint=tmp_path)


def test_weights_that_are_not_rounded_are_in_the_report():
    engine = dsgraph.init_inference(model("mixtral"), quantize="int8", max_tokens=32, options={"codegen": "eager"})
    whole = engine.report().whole_weights
    # 2 layers of 4 experts (gate and up, down), routers, and the embedding
    assert len(whole) == 7 and whole["model.layers.0.mlp.experts.gate_up_proj"] == 4 * 4 * 128 * 32
    assert f"7 weights are not rounded, {sum(whole.values()) / 1e6:.1f} MB; the largest is model.layers.0.mlp." in str(
        engine.report()
    )


def test_where_a_weight_is_missing_the_model_is_as_it_was(tmp_path):
    dsgraph.save_quantized(dsgraph.quantize(model("gpt2")), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    weights, lost = load_file(file), "transformer.h.1.mlp.c_fc.scale"
    kept = {name: weight.clone() for name, weight in weights.items() if name != lost}  # it is mapped
    save_file(kept, file)
    plain = model("gpt2")
    before = dict(plain.named_modules()), dict(plain.named_parameters())
    with pytest.raises(InferenceError, match=f"has no '{lost}'"):
        dsgraph.init_inference(plain, checkpoint=tmp_path, options={"codegen": "eager"})
    assert (dict(plain.named_modules()), dict(plain.named_parameters())) == before


def test_scales_stay_float32_in_bfloat16():
    few = dsgraph.quantize(nn.Sequential(nn.Linear(32, 8)), bits=4, group=16)
    before = few[0].dequantized()
    few.to(torch.bfloat16)
    assert few[0].bias.dtype == torch.bfloat16
    assert torch.equal(few[0].dequantized(), before)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"bits": 8, "group": 64}, "group=64 is for bits=4"),
        ({"bits": 4, "group": 24}, "'0' has 32 inputs, which groups of 24 do not divide"),
        ({"bits": 4, "group": 3}, "even number"),
        ({"skip": "0"}, "a list of names"),
        ({"skip": ["9"]}, "'9', which is no linear layer"),
        ({"skip": ["*"]}, "no linear layer to quantise"),
    ],
)
def test_what_cannot_be_quantised_is_refused_and_nothing_changed(arguments, said):
    plain = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(InferenceError, match=said):
        dsgraph.quantize(plain, **arguments)
    assert type(plain[0]) is nn.Linear


def test_a_model_is_quantised_once_and_saved_when_it_is():
    plain = nn.Sequential(nn.Linear(32, 8))
    with pytest.raises(InferenceError, match="is not quantised"):
        dsgraph.save_quantized(plain, "nowhere")
    dsgraph.quantize(plain)
    with pytest.raises(InferenceError, match="quantised already"):
        dsgraph.quantize(plain)

"""A folder that lacks a weight is refused, by the names of the folder and of the weight."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsgraph
from dsgraph.utils.errors import InferenceError
from tests.inference.families import model

_LOST = "model.layers.1.mlp.up_proj.weight"


def _changed(weights, kind):
    if kind == "lost":
        return {name: value for name, value in weights.items() if name != _LOST}
    return {**weights, _LOST: weights[_LOST][:5].clone()}


@pytest.mark.parametrize(("kind", "said"), [("lost", "lacks 1 weights"), ("shorter", "has other shapes of 1 weights")])
def test_a_weight_that_is_missing_or_of_another_shape_is_named(tmp_path, kind, said):
    model("llama", seed=1).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name: value.clone() for name, value in load_file(file).items()}
    save_file(_changed(weights, kind), file, metadata={"format": "pt"})
    plain = model("llama")
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.raises(InferenceError, match=rf"checkpoint='{tmp_path}' {said} of LlamaForCausalLM, such as '{_LOST}'"):
        dsgraph.init_inference(plain, checkpoint=tmp_path, options={"codegen": "eager"})
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())


def test_a_damaged_file_is_named(tmp_path):
    model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(InferenceError, match=r"checkpoint=.*model.safetensors is damaged"):
        dsgraph.init_inference(model("llama"), checkpoint=tmp_path, options={"codegen": "eager"})

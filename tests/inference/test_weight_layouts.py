"""How weights lie in memory while an engine generates."""

from __future__ import annotations

import pytest
import torch

from dsgraph.inference.weight_layouts import turn_weights, turned_weights
from tests.inference.families import model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_turned_where_a_product_reads_them_so(dtype):
    plain = model("gpt2").to(dtype)
    layers = [layer for layer in plain.modules() if type(layer).__name__ == "Conv1D"]
    before = [(layer.weight.clone(), layer.weight.data_ptr()) for layer in layers]
    turn_weights(plain)
    is_turned = dtype != torch.float16
    assert turned_weights(plain) == (len(layers) if is_turned else 0)
    for layer, (values, address) in zip(layers, before, strict=True):
        assert torch.equal(layer.weight, values) and (layer.weight.data_ptr() != address) == is_turned

"""Weights rounded for given inputs: as GPTQ has it, better than to nearest, one layer after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.inductor_ext.quant.weights import dequantize_groups, dequantize_rows
from dsgraph.inference.quantization.calibrated_rounding import round_weight
from dsgraph.utils.errors import InferenceError
from tests.inference.families import model, prompt


def _inputs(columns: int, rows: int = 200) -> Tensor:
    """Rows whose columns hang together, which is what calibration lives on."""
    generator = torch.Generator().manual_seed(1)
    few = torch.randn(rows, columns // 4, generator=generator)
    return few @ torch.randn(columns // 4, columns, generator=generator) + 0.3 * torch.randn(
        rows, columns, generator=generator
    )


def _one_after_the_other(weight: Tensor, products: Tensor, *, bits: int, group: int) -> Tensor:
    """Each column rounded, and the columns left moved by the inverse of their own part of H: no factor, no blocks."""
    weight, result = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    damped = products.double() + 0.01 * products.double().diagonal().mean() * torch.eye(len(products))
    scale, least = weight.abs().amax(1) / 127, torch.zeros(len(weight), dtype=torch.float64)
    lowest, highest = -127, 127
    for at in range(weight.shape[1]):
        if bits == 4 and at % group == 0:
            least, most = weight[:, at : at + group].aminmax(dim=1)
            scale, lowest, highest = (most - least) / 15, 0, 15
        result[:, at] = ((weight[:, at] - least) / scale).round().clamp(lowest, highest) * scale + least
        inverse = damped[at:, at:].inverse()
        weight[:, at:] -= torch.outer(weight[:, at] - result[:, at], inverse[0] / inverse[0, 0])
    return result.float()


@pytest.mark.parametrize(("bits", "group", "columns"), [(8, 0, 160), (4, 16, 160), (4, 80, 160)])
def test_rounding_is_that_of_one_column_after_the_other(bits, group, columns):
    weight, x = torch.randn(12, columns, generator=torch.Generator().manual_seed(0)), _inputs(columns)
    products = x.t() @ x
    found = round_weight(weight, products, bits=bits, group=group)
    if found.least is None:
        made = dequantize_rows(found.packed, found.scale)
    else:
        made = dequantize_groups(found.packed, found.scale, found.least)
    expected = _one_after_the_other(weight, products, bits=bits, group=group)
    # A number half way between two may fall to either side, and moves what follows.
    assert (torch.isclose(made, expected, rtol=1e-4, atol=1e-5)).float().mean() > 0.98
    outputs = x @ weight.t()
    assert found.error == pytest.approx(float((x @ made.t() - outputs).norm() / outputs.norm()), rel=1e-2)
    assert found.error < 0.6 * found.error_to_nearest


def test_inputs_that_tell_nothing_round_to_nearest():
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for products in (torch.zeros(8, 8), torch.full((8, 8), float("nan"))):
        found = round_weight(weight, products, bits=8, group=0)
        to_nearest = (weight / found.scale[:, None]).round().to(torch.int8)
        assert torch.equal(found.packed, to_nearest)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_outputs_change_less_than_to_nearest_in_every_layer(family):
    few, data = model(family), [prompt(2, length) for length in (9, 17, 24)]
    dsgraph.quantize(few, bits=4, group=16, data=iter(data))
    how = few.quantization
    assert set(how.output_errors) == set(how.errors)
    for name, error in how.output_errors.items():
        assert 0 < error < how.output_errors_to_nearest[name], name
    assert not few.training


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.idle = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.first(x))))


def test_a_layer_sees_what_rounded_layers_give():
    plain, few = _Two(), _Two()
    x = _inputs(32)
    dsgraph.quantize(few, bits=4, group=16, data=[x[:100], (x[100:],)])
    seen = torch.tanh(few.first(x))
    expected = round_weight(plain.second.weight, seen.t() @ seen, bits=4, group=16)
    assert torch.equal(few.second.packed, expected.packed)
    unrounded = torch.tanh(plain.first(x))
    other = round_weight(plain.second.weight, unrounded.t() @ unrounded, bits=4, group=16)
    assert not torch.equal(few.second.packed, other.packed)
    assert few.training and few.drop.training, "calibrated in eval(), and given back as it was"
    assert set(few.quantization.output_errors) == {"first", "second"} and "idle" in few.quantization.errors


def test_calibrated_weights_are_written_and_read_again(tmp_path):
    few = dsgraph.quantize(model("llama", seed=3), bits=4, group=16, data=[prompt(2, 9)], skip=["lm_head"])
    dsgraph.save_quantized(few, tmp_path)
    engine = dsgraph.init_inference(model("llama"), checkpoint=tmp_path, max_tokens=32, options={"codegen": "eager"})
    given = prompt(1, 9)
    with torch.no_grad():  # gradients need other products, whose sums have another order
        assert torch.equal(engine.module(**given).logits, few(**given).logits)
    assert engine.report().quantization == few.quantization
    assert "calibrated: largest error of outputs" in str(engine.report())


@pytest.mark.parametrize(("data", "said"), [(torch.ones(2, 32), "data is a Tensor, one batch"), ([], "data is empty")])
def test_data_that_is_none_is_refused(data, said):
    plain = nn.Sequential(nn.Linear(32, 8))
    with pytest.raises(InferenceError, match=said):
        dsgraph.quantize(plain, data=data)
    assert type(plain[0]) is nn.Linear

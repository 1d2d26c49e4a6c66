"""Random values by seeds, and functions that draw them, against torch's functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsgraph.inductor_ext.kernels import seeded_random as seeded

SEED = torch.tensor([7])


@pytest.mark.parametrize("normal", [False, True])
def test_values_depend_on_the_seed_alone(normal):
    like = torch.empty(200, 300, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.dsgraph.seeded_random.default, (SEED, like, normal))
    before = torch.get_rng_state()
    one, same, other = (torch.ops.dsgraph.seeded_random(torch.tensor([seed]), like, normal) for seed in (7, 7, 8))
    assert torch.equal(one, same) and not torch.equal(one, other) and one.dtype == torch.float32
    assert torch.equal(before, torch.get_rng_state())
    mean, deviation = (0.0, 1.0) if normal else (0.5, 12**-0.5)
    assert abs(float(one.mean()) - mean) < 0.01 and abs(float(one.std()) - deviation) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_drops_its_share_and_scales_the_rest(dtype, inplace):
    x = torch.rand(100, 100).to(dtype) + 1
    y = seeded.dropout(x.clone(), 0.3, inplace=inplace, seed=SEED)
    assert y.dtype == dtype and abs(float((y == 0).float().mean()) - 0.3) < 0.02
    torch.testing.assert_close(y[y != 0], (x / 0.7)[y != 0], rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    assert not seeded.dropout(x, 1.0, seed=SEED).any()


def _attention(heads: int, **options: object) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, heads, 6, 8), torch.randn(2, heads, 6, 8)
    return seeded.scaled_dot_product_attention(q, k, v, dropout_p=0.0, seed=SEED, **options), (
        F.scaled_dot_product_attention(q, k, v, **options)
    )


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (4, {}),
        (4, {"is_causal": True, "scale": 0.2}),
        (4, {"attn_mask": torch.ones(5, 6, dtype=torch.bool).tril(1)}),
        (4, {"attn_mask": torch.linspace(-1, 1, 30).view(5, 6)}),
        (2, {"enable_gqa": True}),
    ],
)
def test_attention_is_that_of_torch(heads, options):
    found, expected = _attention(heads, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_attention_drops_scores():
    q, v = torch.zeros(1, 1, 50, 8), torch.eye(400).view(1, 1, 400, 400)
    found = seeded.scaled_dot_product_attention(q, torch.zeros(1, 1, 400, 8), v, dropout_p=0.25, seed=SEED)
    assert abs(float((found == 0).float().mean()) - 0.25) < 0.02
    torch.testing.assert_close(found[found != 0], torch.full_like(found[found != 0], 1 / 400 / 0.75))


def test_other_functions_have_the_distributions_of_torch():
    x = torch.full((300, 300), 0.2)
    assert abs(float(seeded.bernoulli(x, seed=SEED).mean()) - 0.2) < 0.01
    assert abs(float(seeded.bernoulli_(x.clone(), 0.7, seed=SEED).mean()) - 0.7) < 0.01
    assert abs(float(seeded.uniform_(x.clone(), 1.0, 3.0, seed=SEED).mean()) - 2) < 0.01
    assert abs(float(seeded.normal_(x.clone(), 1.0, 2.0, seed=SEED).std()) - 2) < 0.02
    for made in (seeded.rand_like(x, dtype=torch.bfloat16, seed=SEED), seeded.rand(300, 300, seed=SEED)):
        assert made.shape == x.shape and abs(float(made.float().mean()) - 0.5) < 0.01
    for made in (seeded.randn_like(x, seed=SEED), seeded.randn((300, 300), dtype=torch.float64, seed=SEED)):
        assert made.shape == x.shape and abs(float(made.std()) - 1) < 0.01

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dsgraph.passes.kernels.patterns.decode_attention import SPEC
from tests.inference.families import model, prompt
from tests.passes.kernels.test_substitute_kernels import substitute


def _inputs(*, queries: int = 1):
    torch.manual_seed(0)
    mask = (torch.arange(32) < 9).view(1, 1, 1, 32)
    return torch.randn(2, 4, queries, 8), torch.randn(2, 4, 32, 8), torch.randn(2, 4, 32, 8), mask


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"dropout_p": 0.0, "is_causal": False}])
def test_one_query_with_a_mask_is_found_and_means_the_same(options):
    def function(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

    gm, record, result = substitute(function, *_inputs(), kernels=[SPEC], inference=True)
    assert record.changed == 1 and "scaled_dot" not in gm.code
    torch.testing.assert_close(result, function(*_inputs()))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v), "it has no mask that says"),
        (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, dropout_p=0.5), "it drops probabilities"),
        (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m.float()), "its mask is torch.float32"),
        (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), "read faster than the kernel is called"),
    ],
)
def test_near_misses_are_left_alone_and_named(function, reason):
    _, record, _ = substitute(function, *_inputs(), kernels=[SPEC], asked=False, inference=True)
    assert record.changed == 0 and reason in record.notes[0]


def test_several_queries_are_none_of_its_business():
    function = F.scaled_dot_product_attention
    _, record, _ = substitute(lambda *a: function(*a), *_inputs(queries=3), kernels=[SPEC], asked=False)
    assert record.changed == 0 and record.notes == ()


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.full), "gpt2"])
def test_an_engine_generates_the_same_tokens_with_it(family):
    import dsgraph

    plain, given = model(family), prompt(2, 11, padded=2)
    options = {"codegen": "eager", "kernels": ["decode_attention", "skinny_linear"]}
    engine = dsgraph.init_inference(plain, max_tokens=64, options=options)
    expected = plain.generate(**given, max_new_tokens=12, do_sample=False)
    assert torch.equal(engine.generate(**given, max_new_tokens=12, do_sample=False), expected)
    assert engine.report().turned_weights == (8 if family == "gpt2" else 0)

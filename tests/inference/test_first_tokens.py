"""An engine accepts models whose logits it reproduces, and refuses others by the name of the layer."""

from __future__ import annotations

import pytest
import torch

import dsgraph
from dsgraph.utils.errors import InferenceError
from tests.inference.families import OTHERS, REFUSED, model, prompt

pytestmark = pytest.mark.slow

EAGER = {"codegen": "eager"}
# Windows of 8 tokens: prompts and what is generated reach beyond them.
_WAYS = [{"do_sample": False}, {"do_sample": True}, {"do_sample": False, "num_beams": 3}]
_RUN = ("gemma3",)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in _RUN else pytest.mark.full) for name in OTHERS]
)
def test_tokens_and_logits_are_those_of_transformers(family):
    plain = model(family)
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    for length in (5, 40):
        for way in _WAYS[:1] if family in _RUN else _WAYS:
            given = prompt(2, length, padded=2)
            torch.manual_seed(7)
            expected = plain.generate(**given, max_new_tokens=12, **way)
            torch.manual_seed(7)
            assert torch.equal(engine.generate(**given, max_new_tokens=12, **way), expected), (length, way)
    given = prompt(2, 21)
    torch.testing.assert_close(engine(**given).logits, plain(**given).logits, rtol=1e-4, atol=1e-4)
    assert engine.report().uncompiled.calls == 0


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llama of dynamic positions", r"'model.rotary_emb' has rope_type 'dynamic'"),
        ("mamba", "such as MambaBlock, keep a state that is not a key-value cache"),
        ("lfm2", "layer 0, of type 'conv', keeps a state that is not a key-value cache"),
        ("bloom", "the forward of its BloomBlock fails"),
        ("gpt_neo", r"logits of token \d differ from the model's by .*GPTNeoBlock"),
    ],
)
def test_what_cannot_be_served_is_refused_and_left_as_it_was(family, said):
    assert family in REFUSED
    plain = model(family).train()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.raises(InferenceError, match=said):
        dsgraph.init_inference(plain, max_tokens=64, dtype=torch.bfloat16, options=EAGER)
    assert all(module.training for module in plain.modules())
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())


def test_a_window_that_is_too_long_to_be_compared_is_refused_unless_that_is_turned_off():
    plain = model("gpt_neo")
    plain.config.window_size, plain.config.max_position_embeddings = 1100, 2048
    with pytest.raises(InferenceError, match="its config has window_size=1100"):
        dsgraph.init_inference(plain, max_tokens=2048, options=EAGER)
    assert dsgraph.init_inference(plain, {"verify": False}, max_tokens=2048, options=EAGER).module is plain


def test_the_comparison_compiles_nothing_and_draws_no_random_numbers():
    state = torch.get_rng_state()
    engine = dsgraph.init_inference(model("llama"), max_tokens=64, options=EAGER)
    torch.manual_seed(0)
    model("llama")
    assert engine.report().prompt.compiles == engine.report().prompt.calls == 0
    torch.set_rng_state(state)
    drawn = torch.rand(1)
    torch.set_rng_state(state)
    plain = model("llama")
    torch.set_rng_state(state)
    dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    assert torch.equal(torch.rand(1), drawn)

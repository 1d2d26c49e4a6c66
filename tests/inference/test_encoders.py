"""Encoders, and encoders with decoders, compute what transformers computes, and compile nothing after their warm-up."""

from __future__ import annotations

import pytest
import torch

import dsgraph
from dsgraph.utils.errors import InferenceError
from tests.inference.families import WORDS, encoder, encoder_decoder, prompt

pytestmark = pytest.mark.slow

EAGER = {"codegen": "eager"}
HEADS = [
    "BertModel",
    *[
        pytest.param(name, marks=pytest.mark.full)
        for name in (
            *("BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification"),
            *("BertForQuestionAnswering", "BertForPreTraining"),
        )
    ],
]
# A model that was not trained says what it said before, unless that is forbidden.
_NEW = {"no_repeat_ngram_size": 1}
WAYS = [
    {"do_sample": False, **_NEW},
    pytest.param({"do_sample": True, **_NEW}, marks=pytest.mark.full),
    pytest.param({"do_sample": False, "num_beams": 3, "num_return_sequences": 2, **_NEW}, marks=pytest.mark.full),
]


def _same(found, expected, **tolerance):
    assert type(found) is type(expected) and list(found.keys()) == list(expected.keys())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **tolerance)


@pytest.mark.parametrize("head", HEADS)
def test_an_encoder_gives_what_its_model_gives(head):
    plain = encoder(head)
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    for length in (3, 32, 40):
        given = prompt(2, length)
        given["attention_mask"][1, length - 2 :] = 0
        given["token_type_ids"] = (given["input_ids"] > WORDS // 2).long()
        with torch.no_grad():
            _same(engine(**given), plain(**given), atol=1e-5, rtol=1e-5)
            _same(engine(given["input_ids"]), plain(given["input_ids"]), atol=1e-5, rtol=1e-5)
    warm = engine.report().forward.compiles
    for length in (1, 17, 31, 33, 64):
        engine(**prompt(2, length))
    # Token types and none are two graphs for each of both lengths.
    assert (engine.report().forward.compiles, warm) == (4, 4)


@pytest.mark.full
def test_an_encoder_in_bfloat16():
    plain = encoder("BertForMaskedLM").to(torch.bfloat16)
    engine = dsgraph.init_inference(encoder("BertForMaskedLM"), dtype=torch.bfloat16, max_tokens=32, options=EAGER)
    with torch.no_grad():
        _same(engine(**prompt(2, 7)), plain(**prompt(2, 7)), atol=0.02, rtol=0.02)


@pytest.mark.full
def test_an_encoder_under_inductor():
    plain = encoder("BertModel")
    with torch.no_grad():
        expected = plain(**prompt(2, 7))
        _same(dsgraph.init_inference(plain, max_tokens=32)(**prompt(2, 7)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled", "beams"])
def test_tokens_of_a_decoder_are_those_of_transformers(way):
    plain = encoder_decoder()
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    for length in (40, 3, 11):  # what a longer sequence left in the cache does not count
        given = prompt(2, length, padded=2)
        torch.manual_seed(7)
        expected = plain.generate(**given, max_new_tokens=12, **way)
        torch.manual_seed(7)
        found = engine.generate(**given, max_new_tokens=12, **way)
        assert torch.equal(expected, found), length
        assert len(set(found[0].tolist())) > 3  # it says something
    warm = engine.report()
    assert (warm.encode.compiles, warm.prompt.compiles, warm.decode.compiles) == (2, 2, 1)
    for length in (1, 17, 33, 64):
        engine.generate(**prompt(2, length), max_new_tokens=6, **way)
    after = engine.report()
    assert (after.encode.compiles, after.prompt.compiles, after.decode.compiles) == (2, 2, 1)
    assert "encode: 2 compiled" in str(after)


@pytest.mark.full
def test_a_decoder_goes_on_from_tokens_that_are_given():
    plain = encoder_decoder()
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    begun = torch.tensor([[0, 5, 9], [0, 7, 3]])
    given = {**prompt(2, 9), "decoder_input_ids": begun}
    expected = plain.generate(**given, max_new_tokens=8, do_sample=False, **_NEW)
    assert torch.equal(engine.generate(**given, max_new_tokens=8, do_sample=False, **_NEW), expected)
    with torch.no_grad():
        torch.testing.assert_close(engine(**given).logits, plain(**given).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_decoder_in_16_bits(dtype):
    plain = encoder_decoder().to(dtype)
    engine = dsgraph.init_inference(encoder_decoder(), dtype=dtype, max_tokens=32, options=EAGER)
    given = prompt(2, 6)
    expected = plain.generate(**given, max_new_tokens=8, do_sample=False, **_NEW)
    assert torch.equal(engine.generate(**given, max_new_tokens=8, do_sample=False, **_NEW), expected)


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_all_linear_layers_of_t5_get_few_bits(bits):
    few = dsgraph.quantize(encoder_decoder(), bits=bits, group=16 if bits == 4 else None)
    assert "decoder.block.1.layer.2.DenseReluDense.wo" in few.quantization.errors
    given, twin = prompt(2, 6), encoder_decoder()
    with torch.no_grad():
        twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.clone())  # it was the embedding's
        for name in few.quantization.errors:
            twin.get_submodule(name).weight.copy_(few.get_submodule(name).dequantized())
        given_too = {**given, "decoder_input_ids": given["input_ids"]}
        plain, rounded = twin(**given_too).logits, few(**given_too).logits
        exact = twin.double()(**given_too).logits
    # Layers of T5 make a last digit's difference larger: float32 itself is 4e-5 from float64, in logits up to 3.
    assert (rounded - exact).abs().max() < 4 * (plain - exact).abs().max() < 4e-4
    expected = few.generate(**given, max_new_tokens=8, **_NEW)
    if bits == 8:
        few = dsgraph.init_inference(encoder_decoder(), quantize="int8", max_tokens=32, options=EAGER)
    else:
        few = dsgraph.init_inference(few, max_tokens=32, options=EAGER)
    assert torch.equal(few.generate(**given, max_new_tokens=8, **_NEW), expected)


@pytest.mark.full
def test_weights_of_8_bits_and_files_of_transformers(tmp_path):
    source = encoder_decoder(seed=1)
    source.save_pretrained(tmp_path)
    engine = dsgraph.init_inference(encoder_decoder(), checkpoint=tmp_path, max_tokens=32, options=EAGER)
    given = prompt(1, 6)
    expected = source.generate(**given, max_new_tokens=8, **_NEW)
    assert torch.equal(engine.generate(**given, max_new_tokens=8, **_NEW), expected)
    bert = dsgraph.quantize(encoder("BertForMaskedLM"), bits=8)
    with torch.no_grad():
        expected = bert(**given)
        _same(dsgraph.init_inference(bert, max_tokens=32, options=EAGER)(**given), expected, atol=1e-5, rtol=1e-5)


def test_what_they_cannot_do_is_refused():
    bert = dsgraph.init_inference(encoder("BertModel"), max_tokens=32, options=EAGER)
    with pytest.raises(InferenceError, match="BertModel generates no tokens"):
        bert.generate(prompt(1, 3)["input_ids"])
    with pytest.raises(InferenceError, match="output_attentions is not supported"):
        bert(**prompt(1, 3), output_attentions=True)
    with pytest.raises(InferenceError, match="33 tokens exceed max_tokens=32"):
        bert(**prompt(1, 33))
    with pytest.raises(InferenceError, match=r"BertForMultipleChoice .* is not supported"):
        dsgraph.init_inference(encoder("BertForMultipleChoice"))
    t5 = dsgraph.init_inference(encoder_decoder(), max_tokens=32, options=EAGER)
    with pytest.raises(InferenceError, match="encoder_outputs is not supported"):
        t5.generate(**prompt(1, 3), encoder_outputs=(torch.zeros(1, 3, 32),))
    with pytest.raises(InferenceError, match="a prompt of 1 tokens and max_new_tokens=32 exceed"):
        t5.generate(**prompt(1, 3), max_new_tokens=32)
    with pytest.raises(InferenceError, match="33 tokens exceed max_tokens=32"):
        t5.generate(**prompt(1, 33), max_new_tokens=2)

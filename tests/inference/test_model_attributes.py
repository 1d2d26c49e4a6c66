"""An engine can be used where transformers expects a model."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline

import dsgraph
from dsgraph.utils.errors import InferenceError
from tests.inference.families import WORDS, model, prompt

EAGER = {"codegen": "eager"}


def _tokenizer():
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w3", pad_token="w0")


def test_a_pipeline_writes_what_it_writes_with_the_model():
    plain = model("llama")
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    given, tokenizer = ("w4 w5 w6", {"max_new_tokens": 5, "do_sample": False}), _tokenizer()
    expected = pipeline("text-generation", model=plain, tokenizer=tokenizer)(given[0], **given[1])
    assert pipeline("text-generation", model=engine, tokenizer=tokenizer)(given[0], **given[1]) == expected
    tokens = prompt(1, 5)["input_ids"]
    engine.generation_config.max_new_tokens = 3
    assert engine.generate(inputs=tokens, do_sample=False).shape == (1, 8)


def test_what_is_read_is_the_models_and_what_would_change_it_is_refused():
    plain = model("llama")
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    assert engine.config is plain.config
    assert list(engine.state_dict()) == list(plain.state_dict())
    assert len(list(engine.parameters())) == len(list(plain.parameters()))
    assert (engine.device, engine.dtype, engine.can_generate()) == (torch.device("cpu"), torch.float32, True)
    assert engine.eval() is engine.to("cpu") is engine.to(torch.float32) is engine.to("cpu", torch.float32) is engine
    assert engine.float() is engine.train(False) is engine
    for change in (lambda: engine.to(torch.bfloat16), lambda: engine.to("meta"), engine.half, engine.train):
        with pytest.raises(InferenceError, match=r"before init_inference|then make the engine"):
            change()
    with pytest.raises(AttributeError, match=r"engine\.module is the model"):
        engine.resize_token_embeddings(3)


def test_labels_and_positions_give_the_models_loss():
    plain = model("llama")
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    given = {**prompt(2, 9), "position_ids": torch.arange(9)[None] + 3}
    given["labels"] = given["input_ids"].masked_fill(given["input_ids"] > 80, -100)
    with torch.no_grad():
        expected = plain(**given)
    found = engine(**given, use_cache=False)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.logits, expected.logits)
    with pytest.raises(InferenceError, match="engine: output_attentions=True is not supported"):
        engine(given["input_ids"], output_attentions=True)

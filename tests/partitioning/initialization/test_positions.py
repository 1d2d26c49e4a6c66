"""Tables of positions of real models, made longer."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import dsgraph

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 18,
}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}


def _tokens(length):
    return torch.randint(2, 32, (2, length))


@pytest.mark.parametrize(
    ("name", "table"),
    [("Bert", "embeddings.position_embeddings"), ("Roberta", "embeddings.position_embeddings"), ("GPT2", "wpe")],
)
def test_models_take_longer_sequences(name, table):
    sizes = GPT2 | {"bos_token_id": 0, "eos_token_id": 0} if name == "GPT2" else SIZES
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    before = model.get_submodule(table).weight.clone()
    short = model(input_ids=(tokens := _tokens(16))).last_hidden_state
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=_tokens(40))
    assert dsgraph.extend_positions(model, 40) is model
    after = model.get_submodule(table).weight
    offset = 2 if name == "Roberta" else 0
    assert len(after) == 40 + offset
    assert torch.equal(after[: len(before)], before)
    assert torch.equal(after[len(before) :][:5], before[offset:][:5])
    assert model(input_ids=_tokens(40)).last_hidden_state.shape == (2, 40, 16)
    assert torch.equal(model(input_ids=tokens).last_hidden_state, short)


def test_rotary_models_have_no_table():
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
    dsgraph.extend_positions(model, 64)
    assert model.config.max_position_embeddings == 64


def test_what_cannot_be_extended_is_refused():
    with pytest.raises(dsgraph.PositionsError, match="Linear has no table of positions"):
        dsgraph.extend_positions(nn.Linear(2, 2), 64)
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    with pytest.raises(dsgraph.PositionsError, match="length is 18, and position_embeddings has 18 positions already"):
        dsgraph.extend_positions(model, 18)

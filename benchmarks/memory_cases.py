"""The models that `benchmarks.memory_model` trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.training import GPT_27M, GPT_TINY
from examples.gpt import GPT, GPTConfig

# Sizes of the transformers models: 4 to 5 million parameters.
WIDTH, LAYERS, HEADS, VOCAB = 256, 4, 4, 4096
BATCH, LENGTH = 2, 128  # rows of a rank, tokens of a row


@dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
        build: Makes it.
        vocab: How many tokens it knows.
        loss: The loss of a model on tokens and targets.
        batch: Rows of a rank.
        length: Tokens of a row.
    """

    build: Callable[[], nn.Module]
    vocab: int
    loss: Callable[[Any, Tensor, Tensor], Tensor]
    batch: int = BATCH
    length: int = LENGTH


def _gpt(config: GPTConfig, *shape: int) -> Case:
    return Case(lambda: GPT(config), config.vocab, lambda model, tokens, targets: model(tokens, targets), *shape)


def _labelled(build: Callable[[], nn.Module], *shape: int) -> Case:
    return Case(build, VOCAB, lambda model, tokens, targets: model(input_ids=tokens, labels=targets).loss, *shape)


def _llama(layers: int = LAYERS) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=688,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=2 * LENGTH)
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
        )
    )


CASES = {
    "gpt": _gpt(GPT_27M),
    "llama": _labelled(_llama),
    "gpt2": _labelled(_gpt2),
    "bert": _labelled(_bert),
    "gpt-small": _gpt(GPTConfig(vocab=512, width=64, heads=2, layers=2)),
    "gpt-tiny": _gpt(GPT_TINY),
}

# Those of `benchmarks.activations`: activations are most of their memory.
DEEP = {
    "gpt": _gpt(GPT_27M, 4, 256),
    "llama": _labelled(partial(_llama, 12), 4, 256),
    "tiny": _gpt(GPTConfig(vocab=64, width=32, heads=2, layers=3), 4, 64),
}

# Those of `benchmarks.limits`: next to no parameters beside their activations, and many layers.
LIMITED = {
    "disk": _gpt(GPTConfig(vocab=64, width=64, heads=2, layers=24), 64, 128),
    "planning": _gpt(GPTConfig(vocab=256, width=64, heads=4, layers=96), 4, 128),
    "disk-quick": _gpt(GPTConfig(vocab=64, width=32, heads=2, layers=4), 8, 128),
    "planning-quick": _gpt(GPTConfig(vocab=64, width=32, heads=2, layers=4), 4, 64),
}

"""The Llama that decoding is measured on, and how."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

PROMPT = 64
"""Tokens of a prompt."""


def sizes(*, quick: bool) -> dict[str, int]:
    """Return the sizes of the Llama of 120 million parameters, or of a tiny one."""
    return {"layers": 2, "width": 128, "words": 1024} if quick else {"layers": 12, "width": 768, "words": 32000}


def llama(*, layers: int, width: int, words: int, positions: int) -> Any:
    """With the same random weights each time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": words,
            "hidden_size": width,
            "intermediate_size": width * 8 // 384 * 128,
            "num_hidden_layers": layers,
        },
        **{"num_attention_heads": width // 64, "num_key_value_heads": width // 64},
        **{"max_position_embeddings": positions, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1},
    )
    return transformers.LlamaForCausalLM(config).eval()


def rate(generate: Callable[[Tensor, int], Any], prompt: Tensor, new: int) -> float:
    """Return tokens a second after the first ones, of all rows: a run of one token is subtracted."""
    started = time.perf_counter()
    generate(prompt, 1)
    middle = time.perf_counter()
    generate(prompt, new)
    return len(prompt) * (new - 1) / max(time.perf_counter() - middle - (middle - started), 1e-9)

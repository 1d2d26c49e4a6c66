"""The static key-value cache of an engine, one for each batch size."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls a cache, as an argument and in outputs: from 5.24 on, and before."""

_fields = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
CACHE_NAME = next(name for name in CACHE_NAMES if name in _fields)
"""That of `CACHE_NAMES` which the installed transformers uses."""


class RewindableCache(StaticCache):
    """transformers' static cache, which stays where it is in memory and forgets what a padded prompt wrote."""

    layers: list[Any]

    def rewind(self, length: int) -> None:
        """Lets the first `length` positions count; what stands behind them is written over before it is read."""
        for layer in self.layers:
            layer.cumulative_length.fill_(length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the rows of the batch in place, so that compiled graphs find the same memory."""
        for layer in self.layers:
            layer.keys.copy_(layer.keys.index_select(0, beam_idx))
            layer.values.copy_(layer.values.index_select(0, beam_idx))


def new_cache(
    config: PreTrainedConfig, *, rows: int, max_tokens: int, dtype: torch.dtype, device: torch.device
) -> RewindableCache:
    """A cache of zeros.

    Args:
        config: The model's.
        rows: Sequences at once.
        max_tokens: Positions of each.
        dtype: Of keys and values.
        device: Where they lie.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = RewindableCache(config=config, max_cache_len=max_tokens)
    cache.early_initialization(rows, heads, size, dtype, device)
    return cache

"""The static key-value caches of an engine, one for each batch size."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from .ranks import SlicingRanks

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
        for memory in self.memory():
            memory.copy_(memory.index_select(0, beam_idx))

    def memory(self) -> list[Tensor]:
        """Keys and values as this rank holds them, layer by layer."""
        return [tensor for layer in self.layers for tensor in _held(layer)]


def _held(layer: Any) -> tuple[Tensor, Tensor]:
    if isinstance(layer, SlicedLayer):
        return layer.own_keys, layer.own_values
    return layer.keys, layer.values


class EncoderDecoderMemory(EncoderDecoderCache):
    """Static caches of a decoder: of its own tokens, and of what the encoder gave.

    Attributes:
        self_attention_cache: Of the decoder's own tokens.
        cross_attention_cache: Of the encoder's hidden states.
    """

    self_attention_cache: Any
    cross_attention_cache: Any

    def rewind(self, length: int) -> None:
        """Lets the first `length` tokens of the decoder count; 0: what the encoder gave is written anew as well."""
        self.self_attention_cache.rewind(length)
        if length == 0:
            self.cross_attention_cache.rewind(0)
            self.is_updated = dict.fromkeys(self.is_updated, False)

    def memory(self) -> list[Tensor]:
        """Keys and values of both."""
        return self.self_attention_cache.memory() + self.cross_attention_cache.memory()


class SlicedLayer(StaticLayer):
    """A layer of which this rank holds its heads; the model's code writes and reads those of all.

    Attributes:
        own_keys: (rows, heads / ranks, positions, width).
        own_values: Likewise.
    """

    own_keys: Tensor
    own_values: Tensor

    def __init__(self, max_cache_len: int, ranks: SlicingRanks) -> None:
        """An empty one.

        Args:
            max_cache_len: Positions.
            ranks: Those that share the heads.
        """
        self._ranks = ranks
        super().__init__(max_cache_len)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes memory for this rank's heads, of which there are as many as in `key_states`."""
        plain: Any = StaticLayer(self.max_cache_len)
        plain.lazy_initialization(key_states, value_states)
        self.own_keys, self.own_values = plain.keys, plain.values
        self.cumulative_length, self.device = plain.cumulative_length, plain.device
        self.batch_size = plain.batch_size
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes keys and values of all heads behind those that count; gives those of all heads and positions."""
        count = key_states.shape[-2]
        positions = torch.arange(count, device=self.device) + self.cumulative_length
        self.cumulative_length.add_(count)
        write = torch.ops.dsgraph.write_heads
        ranks, group = self._ranks.count, self._ranks.group
        return (
            write(self.own_keys, key_states, positions, ranks, group),
            write(self.own_values, value_states, positions, ranks, group),
        )

    @property
    def keys(self) -> Tensor:
        """Those of all heads, which T5 reads where it attends to what was encoded before."""
        return self._all_heads(self.own_keys)

    @keys.setter
    def keys(self, value: Any) -> None:
        self.own_keys = value

    @property
    def values(self) -> Tensor:
        """Likewise."""
        return self._all_heads(self.own_values)

    @values.setter
    def values(self, value: Any) -> None:
        self.own_values = value

    def _all_heads(self, own: Tensor) -> Tensor:
        # A marker in captured graphs, where nothing is sent; a gather elsewhere.
        full: Tensor = torch.ops.dsgraph.gather_slices(own, 1, 1, self._ranks.count, self._ranks.group)
        return full


def new_cache(
    config: PreTrainedConfig,
    *,
    rows: int,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    ranks: SlicingRanks | None,
) -> RewindableCache:
    """A cache of zeros for a decoder.

    Args:
        config: The model's.
        rows: Sequences at once.
        max_tokens: Positions of each.
        dtype: Of keys and values.
        device: Where they lie.
        ranks: Those that share the heads; None: this one holds all.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = RewindableCache(config=config, max_cache_len=max_tokens)
    if config.is_encoder_decoder:  # transformers counts the encoder's layers
        cache.layers = [StaticLayer(max_tokens) for _ in range(config.num_decoder_layers)]
    if ranks is not None:
        cache.layers = [SlicedLayer(max_tokens, ranks) for _ in cache.layers]
        heads //= ranks.count
    cache.early_initialization(rows, heads, size, dtype, device)
    return cache

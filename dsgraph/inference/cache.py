"""The static key-value caches of an engine: each call takes one from a pool and gives it back."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from .slicing_ranks import SlicingRanks

CACHE_NAMES = ("cache", "past_key_values")
"""Names of a cache in transformers, as an argument and in outputs: from 5.24 on, and before."""

_fields = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
CACHE_NAME = next(name for name in CACHE_NAMES if name in _fields)
"""The one of `CACHE_NAMES` that the installed transformers uses."""


class RewindableCache(StaticCache):
    """A static cache of transformers that keeps its memory and drops the entries of a prompt's padding.

    Every layer keeps all positions, also with a sliding window: the mask hides positions outside the window, and a
    padded prompt cannot push tokens out of it.

    Attributes:
        filled: Tokens per row that the call which owns the cache has written.
    """

    layers: list[Any]
    filled: int = 0

    def rewind(self, length: int) -> None:
        """Keep the first `length` positions; later ones are overwritten before they are read."""
        for layer in self.layers:
            layer.cumulative_length.fill_(length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch in place, so that compiled graphs find the same memory."""
        for memory in self.memory():
            memory.copy_(memory.index_select(0, beam_idx))

    def memory(self) -> list[Tensor]:
        """Return keys and values as this rank holds them, layer by layer."""
        return [tensor for layer in self.layers for tensor in _held(layer)]


def _held(layer: Any) -> tuple[Tensor, Tensor]:
    if isinstance(layer, SlicedLayer):
        return layer.own_keys, layer.own_values
    return layer.keys, layer.values


class EncoderDecoderMemory(EncoderDecoderCache):
    """Static caches of a decoder: of its own tokens, and of the encoder's output.

    Attributes:
        self_attention_cache: The cache of the decoder's own tokens.
        cross_attention_cache: The cache of the encoder's hidden states.
        filled: Decoder tokens per row that the call which owns the cache has written.
        of_encoder: Arguments of the forward that mask the encoder's positions.
    """

    self_attention_cache: Any
    cross_attention_cache: Any
    filled: int = 0
    of_encoder: dict[str, Any]

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens of the decoder; 0: the encoder's part is written again as well."""
        self.self_attention_cache.rewind(length)
        if length == 0:
            self.cross_attention_cache.rewind(0)
            self.is_updated = dict.fromkeys(self.is_updated, False)

    def memory(self) -> list[Tensor]:
        """Return keys and values of both caches."""
        return self.self_attention_cache.memory() + self.cross_attention_cache.memory()


class FullLayer(StaticLayer):
    """A static layer of transformers whose memory is an input of graphs, so that one graph serves every cache."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys and values for the rows, heads and widths of `key_states` and `value_states`."""
        self.device = key_states.device
        self.batch_size, self.num_heads, _, self.k_head_dim = key_states.shape
        self.v_head_dim = value_states.shape[-1]
        sizes = (self.batch_size, self.num_heads, self.max_cache_len)
        self.keys = key_states.new_zeros((*sizes, self.k_head_dim))
        self.values = value_states.new_zeros((*sizes, self.v_head_dim))
        self.cumulative_length = self.cumulative_length.to(self.device)
        self.is_initialized = True


class SlicedLayer(StaticLayer):
    """A tensor-parallel layer of a cache: this rank holds its heads; the model's code writes and reads all heads.

    Attributes:
        own_keys: (rows, heads / ranks, positions, width).
        own_values: (rows, heads / ranks, positions, width).
    """

    own_keys: Tensor
    own_values: Tensor

    def __init__(self, max_cache_len: int, ranks: SlicingRanks) -> None:
        """Create an empty layer.

        Args:
            max_cache_len: Positions.
            ranks: The ranks that share the heads.
        """
        self._ranks = ranks
        super().__init__(max_cache_len)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate memory for this rank's heads, of which there are as many as in `key_states`."""
        plain: Any = FullLayer(self.max_cache_len)
        plain.lazy_initialization(key_states, value_states)
        self.own_keys, self.own_values = plain.keys, plain.values
        self.cumulative_length, self.device = plain.cumulative_length, plain.device
        self.batch_size = plain.batch_size
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values of all heads; return those of all heads and positions."""
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
        """The keys of all heads, which T5 reads to attend to the encoder's output."""
        return self._all_heads(self.own_keys)

    @keys.setter
    def keys(self, value: Any) -> None:
        self.own_keys = value

    @property
    def values(self) -> Tensor:
        """The values of all heads."""
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
    """Return a cache of zeros for a decoder.

    Args:
        config: The model's.
        rows: Number of sequences.
        max_tokens: Positions of each.
        dtype: Of keys and values.
        device: Their device.
        ranks: The ranks that share the heads; None: this one holds all.
    """
    text: Any = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = RewindableCache(config=config, max_cache_len=max_tokens)
    # For an encoder and a decoder transformers counts the encoder's layers.
    count = text.num_decoder_layers if config.is_encoder_decoder else len(cache.layers)
    cache.layers = [FullLayer(max_tokens) for _ in range(count)]
    if ranks is not None:
        cache.layers = [SlicedLayer(max_tokens, ranks) for _ in cache.layers]
        heads //= ranks.count
    cache.early_initialization(rows, heads, size, dtype, device)
    return cache


class CachePool:
    """A pool of caches by number of rows. A call owns the cache that it takes; overlapping calls own different ones."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        """Allocate nothing yet.

        Args:
            make: Makes a cache for a number of rows.
        """
        self._make = make
        self._lock = threading.Lock()
        self._free: dict[int, list[Any]] = {}
        self._made: dict[int, list[Any]] = {}

    @contextmanager
    def lent(self, rows: int) -> Iterator[Any]:
        """Lend an empty cache of `rows` rows for the duration of a `with` block."""
        with self._lock:
            free = self._free.setdefault(rows, [])
            cache = free.pop() if free else None
        if cache is None:
            cache = self._make(rows)
            with self._lock:
                self._made.setdefault(rows, []).append(cache)
        cache.rewind(0)
        cache.filled = 0
        try:
            yield cache
        finally:
            with self._lock:
                self._free[rows].append(cache)

    def nbytes(self) -> dict[int, int]:
        """Return the bytes of keys and values by number of rows, summed over the caches of the pool."""
        with self._lock:
            made = {rows: list(caches) for rows, caches in self._made.items()}
        return {
            rows: sum(memory.nbytes for cache in caches for memory in cache.memory()) for rows, caches in made.items()
        }

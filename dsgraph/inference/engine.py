"""`InferenceEngine`: an unmodified model of transformers, generating with a static cache and compiled graphs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutputWithPast

from dsgraph.errors import InferenceError

from .cache import CACHE_NAME, CACHE_NAMES, EncoderDecoderMemory, RewindableCache, new_cache
from .graphs import Graphs
from .layouts import turned_weights
from .quantize import whole_weights
from .ranks import SlicingRanks
from .report import InferenceReport

_LEAST_BUCKET = 32
# What transformers hands to a forward besides what `_serve` takes, where it means nothing.
_EMPTY = (None, False)
# Arguments of `generate` that decode several tokens at once.
_SEVERAL = ("assistant_model", "prompt_lookup_num_tokens")


class InferenceEngine:
    """What `init_inference` returns.

    transformers' own `generate` does the search: greedy, sampling, beams, stopping, streaming. Each of its calls of the
    model runs one of two compiled graphs: a prompt, padded on its right to a bucket, or one token a row. The engine
    owns the key-value cache, of which there is one for each number of rows.

    Attributes:
        module: The model.
        max_tokens: Positions of the cache: prompt and generated tokens together.
    """

    _prefix = ""
    """What stands before the names of the arguments that are tokens to go on from."""
    _outputs: type[Any] = CausalLMOutputWithPast
    """What transformers' `generate` takes from a forward."""

    def __init__(
        self, module: Any, *, max_tokens: int, options: Mapping[str, Any], ranks: SlicingRanks | None = None
    ) -> None:
        """Compiles nothing yet.

        Args:
            module: Of transformers, in `eval()`: a causal one; subclasses take others.
            max_tokens: Positions of the cache.
            options: Of the backend.
            ranks: Those that share each layer of `module`; None: this one has all of it.
        """
        self.module = module
        self.max_tokens = max_tokens
        self._ranks = ranks
        self._graphs = Graphs(module, options)
        self._caches: dict[int, RewindableCache | EncoderDecoderMemory] = {}
        self._length = 0
        self._buckets = _buckets(max_tokens)
        self._serving = self._with_own_forward(module)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        """The logits of whole sequences, without a cache.

        Args:
            input_ids: (rows, length), of at most `max_tokens` tokens.
            attention_mask: (rows, length): 0 where a token is padding. None: none is.

        Returns:
            What the model returns, with `logits` (rows, length, words) alone.

        Raises:
            InferenceError: The sequences are too long.
        """
        rows, length = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        whole = {"input_ids": input_ids, "attention_mask": attention_mask}
        self._confirm_batches(whole)
        given = {**self._behind(whole), "use_cache": False}
        logits = self._graphs.run("forward", given, tokens=rows * length)["logits"]
        return CausalLMOutputWithPast(logits=logits[:, :length])

    def generate(self, input_ids: Tensor, **arguments: Any) -> Any:
        """What `model.generate(input_ids, **arguments)` returns, token for token.

        Args:
            input_ids: (rows, length). Prompts of several lengths are padded on the left, with an `attention_mask`.
            **arguments: Those of transformers' `generate`.

        Raises:
            InferenceError: More tokens than `max_tokens`, or an argument that needs another cache or more outputs.
        """
        for name in (*CACHE_NAMES, "cache_implementation", "inputs_embeds", *_SEVERAL):
            if arguments.get(name) is not None:
                raise InferenceError(
                    f"generate: {name} cannot be taken: the engine owns the cache, and decodes one token at a time; "
                    "call engine.module.generate"
                )
        new_tokens = arguments.get("max_new_tokens")
        behind = self._prompt_length(input_ids, arguments)
        if new_tokens is not None and behind + new_tokens > self.max_tokens:
            raise InferenceError(
                f"generate: a prompt of {behind} tokens and max_new_tokens={new_tokens} exceed "
                f"max_tokens={self.max_tokens}: give init_inference a larger one"
            )
        if self._ranks is not None:
            self._ranks.confirm("generate different tokens", self._drawn_from(input_ids, arguments))
        cache = self._cache(input_ids.shape[0] * _copies(self.module.generation_config, arguments))
        cache.rewind(0)
        self._length = 0
        found = self._serving.generate(input_ids, **{CACHE_NAME: cache}, **arguments)
        if self._ranks is not None:
            tokens = found if isinstance(found, Tensor) else found.sequences
            self._ranks.confirm("hand out different tokens", {"tokens": tokens})
        return found

    def report(self) -> InferenceReport:
        """Compiles, calls and tokens a second so far, and what the weights became."""
        sizes = {rows: sum(memory.nbytes for memory in cache.memory()) for rows, cache in self._caches.items()}
        quantization = getattr(self.module, "quantization", None)
        counts = {kind: copy.copy(of_kind) for kind, of_kind in self._graphs.counts.items()}
        return InferenceReport(
            prompt=counts["prompt"],
            decode=counts["decode"],
            forward=counts["forward"],
            encode=counts["encode"],
            buckets=self._buckets,
            cache_bytes=sizes,
            quantization=quantization,
            whole_weights={} if quantization is None else whole_weights(self.module),
            turned_weights=turned_weights(self.module),
        )

    def _confirm_batches(self, given: Mapping[str, Tensor]) -> None:
        if self._ranks is not None:
            self._ranks.confirm("compute different batches", given)

    def _drawn_from(self, input_ids: Tensor, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What decides which tokens are generated."""
        config = arguments.get("generation_config") or self.module.generation_config
        found = {"input_ids": input_ids, **arguments}
        if arguments.get("do_sample", config.do_sample):
            is_cuda = input_ids.is_cuda
            found["random state"] = torch.cuda.get_rng_state(input_ids.device) if is_cuda else torch.get_rng_state()
        return found

    def _with_own_forward(self, module: Any) -> Any:
        """A shallow copy, which shares all parts and parameters. So the user's model keeps its forward."""

        @functools.wraps(module.forward)  # transformers reads the names of its arguments
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._serve(*args, **kwargs)

        serving = copy.copy(module)
        object.__setattr__(serving, "forward", forward)
        return serving

    def _prompt_length(self, input_ids: Tensor, arguments: Mapping[str, Any]) -> int:
        """Tokens of the cache that are filled ahead of the first generated one."""
        del arguments
        return input_ids.shape[1]

    def _serve(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """The forward that `generate` calls: a prompt first, then one token a row."""
        cache = others.pop(CACHE_NAME)
        self._refuse(others)
        rows, length = input_ids.shape
        self._refuse_several(length)
        if position_ids is None:
            position_ids = torch.arange(self._length, self._length + length, device=input_ids.device)[None]
        given = {
            "input_ids": input_ids,
            "attention_mask": self._whole_mask(input_ids, attention_mask),
            "position_ids": position_ids.expand(rows, length).contiguous(),
        }
        return self._step(given, cache)

    def _refuse_several(self, length: int) -> None:
        if self._length and length > 1:
            raise InferenceError(
                f"generate: {length} tokens at once behind a prompt; the engine takes one: leave out "
                "prefill_chunk_size and other ways of decoding several tokens"
            )
        if self._length + length > self.max_tokens:
            raise InferenceError(f"generate: more than max_tokens={self.max_tokens}: give init_inference a larger one")

    def _step(self, given: dict[str, Any], cache: Any) -> Any:
        """Runs one of the two graphs: of a prompt, if there was none yet, or of one token a row."""
        rows, length = given[f"{self._prefix}input_ids"].shape
        if self._length:
            logits = self._graphs.run("decode", {**given, CACHE_NAME: cache}, tokens=rows)
        else:
            last = torch.tensor([length - 1], device=given[f"{self._prefix}input_ids"].device)
            padded = {**self._padded(given), CACHE_NAME: cache}
            logits = self._graphs.run("prompt", padded, last, tokens=rows * length)
            cache.rewind(length)
        self._length += length
        return self._outputs(**{"logits": logits, CACHE_NAME: cache})

    def _padded(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Pads a prompt on its right. Padding sees what the last token sees; the last token does not see padding."""
        ids, mask = (given[self._prefix + name] for name in ("input_ids", "attention_mask"))
        behind = self._bucket(ids.shape[1]) - ids.shape[1]
        found = {
            **given,
            f"{self._prefix}input_ids": functional.pad(ids, (0, behind)),
            f"{self._prefix}attention_mask": torch.cat([mask, mask[:, :, -1:].expand(-1, -1, behind, -1)], 2),
        }
        if "position_ids" in given:
            positions = given["position_ids"]
            found["position_ids"] = torch.cat([positions, positions[:, -1:].expand(-1, behind)], 1)
        return found

    def _behind(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pads tensors (rows, length) with zeros to a bucket."""
        return {
            name: functional.pad(value, (0, self._bucket(value.shape[1]) - value.shape[1]))
            for name, value in whole.items()
        }

    def _refuse(self, others: Mapping[str, Any]) -> None:
        known = {"use_cache": True, "return_dict": True, "logits_to_keep": 1}
        for name, value in others.items():
            if not any(value is empty for empty in _EMPTY) and (name not in known or value != known[name]):
                raise InferenceError(
                    f"generate: {name}={value!r} cannot be taken: the engine's graphs return logits alone, of tokens; "
                    "call engine.module.generate"
                )

    def _cache(self, rows: int) -> Any:
        if rows not in self._caches:
            self._caches[rows] = self._new_cache(rows)
        return self._caches[rows]

    def _new_cache(self, rows: int) -> RewindableCache | EncoderDecoderMemory:
        model: nn.Module = self.module
        (device,) = {param.device for param in model.parameters()}
        return new_cache(
            **{"config": self.module.config, "rows": rows, "max_tokens": self.max_tokens},
            **{"dtype": self.module.dtype, "device": device, "ranks": self._ranks},
        )

    def _whole_mask(self, ids: Tensor, mask: Tensor | dict[str, Tensor] | None) -> Tensor:
        """Of attention: (rows, 1, length, max_tokens)."""
        if isinstance(mask, dict):  # one for each type of layer; there is one type
            mask = mask["full_attention"]
        if mask is not None:
            return mask
        rows, length = ids.shape
        seen = torch.arange(self._length, self._length + length, device=ids.device)
        causal = torch.arange(self.max_tokens, device=ids.device) <= seen[:, None]
        return causal.expand(rows, 1, -1, -1)

    def _bucket(self, length: int) -> int:
        for bucket in self._buckets:
            if length <= bucket:
                return bucket
        raise InferenceError(f"{length} tokens exceed max_tokens={self.max_tokens}: give init_inference a larger one")


def _copies(defaults: Any, arguments: Mapping[str, Any]) -> int:
    """How many rows of the batch one prompt becomes: beams, or sequences to return."""
    config = arguments.get("generation_config") or defaults
    counts = [arguments.get(n) or getattr(config, n, None) or 1 for n in ("num_beams", "num_return_sequences")]
    return max(counts)


def _buckets(max_tokens: int) -> tuple[int, ...]:
    """Powers of two up to `max_tokens`, which is the last."""
    found = []
    size = _LEAST_BUCKET
    while size < max_tokens:
        found.append(size)
        size *= 2
    return (*found, max_tokens)

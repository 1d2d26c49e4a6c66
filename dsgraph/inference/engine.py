"""`InferenceEngine`: an unmodified model of transformers, generating with a static cache and compiled graphs."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutputWithPast

from dsgraph.utils.errors import InferenceError

from . import padding, requests
from .cache import CACHE_NAME, CachePool, EncoderDecoderMemory, RewindableCache, new_cache
from .graphs import Graphs
from .inference_report import InferenceReport
from .model_attributes import ModelAttributes
from .quantization.quantize import whole_weights
from .slicing_ranks import SlicingRanks
from .weight_layouts import turned_weights

# Arguments that transformers passes to a forward, besides those of `_serve`, with values that have no effect.
_EMPTY = (None, False)
_IGNORED = -100
"""The label that losses ignore."""


class InferenceEngine(ModelAttributes):
    """A model that `init_inference` has prepared for generation.

    transformers' own `generate` does the search: greedy, sampling, beams, stopping, streaming. Each of its calls of the
    model runs one of two compiled graphs: a prompt, padded on its right to a bucket, or one token a row. Each call of
    `generate` owns a key-value cache, which it takes from a pool, so that threads may call an engine at once; their
    graphs run in turn. Where ranks share the layers, whole calls wait for each other, in the same order on each rank.

    A forward with other arguments than the next token, such as the second one of `guidance_scale`, is computed by the
    model itself, uncompiled; the report counts these.

    Attributes:
        module: The model.
        max_tokens: Positions of the cache: prompt and generated tokens together.
    """

    _prefix = ""
    """Prefix of the names of the arguments that hold the tokens to continue from."""
    _outputs: type[Any] = CausalLMOutputWithPast
    """The type of output that transformers' `generate` expects from a forward."""

    def __init__(
        self, module: Any, *, max_tokens: int, options: Mapping[str, Any], ranks: SlicingRanks | None = None
    ) -> None:
        """Create the engine; graphs are compiled on first use.

        Args:
            module: A causal model of transformers, in `eval()`; subclasses support others.
            max_tokens: Number of positions of the cache.
            options: Options of the backend.
            ranks: The ranks that share each layer of `module`; None: this one has all of it.
        """
        self.module = module
        self.max_tokens = max_tokens
        self._ranks = ranks
        self._turns: AbstractContextManager[Any] = nullcontext() if ranks is None else threading.RLock()
        self._graphs = Graphs(module, options)
        self._pool = CachePool(self._new_cache)
        self._buckets = padding.buckets(max_tokens)
        self._takes = set(inspect.signature(module.forward).parameters)
        self._serving = self._with_own_forward(module)

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Return the logits of whole sequences, computed without a cache.

        Args:
            input_ids: (rows, length), of at most `max_tokens` tokens.
            attention_mask: (rows, length): 0 where a token is padding. None: none is.
            position_ids: (rows, length). None: the model's default.
            labels: (rows, length): tokens for the loss, -100 for ignored positions. None: no loss is computed.
            **others: `use_cache=False`, `return_dict=True`, and arguments that are None.

        Returns:
            The model's output, with `logits` (rows, length, vocabulary), and with `loss` if labels are given.

        Raises:
            InferenceError: The sequences are too long, or an argument is not supported.
        """
        self._refuse(others, {"use_cache": (False,), "return_dict": (True,)}, where="engine")
        rows, length = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        whole = {"input_ids": input_ids, "attention_mask": attention_mask}
        whole |= {} if position_ids is None else {"position_ids": position_ids.expand(rows, length)}
        found = self._whole(whole, labels)
        return CausalLMOutputWithPast(**{**found, "logits": found["logits"][:, :length]})

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **arguments: Any) -> Any:
        """Return what the model's `generate` returns for these arguments, token for token.

        Args:
            inputs: (rows, length), also as `input_ids=`. Prompts of several lengths are padded on the left, with an
                `attention_mask`.
            generation_config: transformers' `GenerationConfig`; None: the model's.
            **arguments: Those of transformers' `generate`.

        Raises:
            InferenceError: More tokens than `max_tokens`, or an argument that needs another cache or more outputs.
        """
        input_ids = requests.prompt_of(inputs, arguments)
        requests.refuse(arguments, generation_config)
        config = self._defaults() if generation_config is None else generation_config
        requests.check_length(self._prompt_length(input_ids, arguments), arguments, config, most=self.max_tokens)
        rows = input_ids.shape[0] * requests.copies(arguments, config)
        is_cached = requests.setting("use_cache", arguments, config) is not False
        given = {**arguments, "generation_config": generation_config}
        with self._turns:
            if self._ranks is not None:
                self._ranks.confirm("generate different tokens", self._drawn_from(input_ids, given, config))
            self._serving.generation_config = self._defaults()
            if is_cached:
                with self._pool.lent(rows) as cache:
                    found = self._serving.generate(input_ids, **{CACHE_NAME: cache}, **given)
            else:
                found = self._serving.generate(input_ids, **given)
            if self._ranks is not None:
                tokens = found if isinstance(found, Tensor) else found.sequences
                self._ranks.confirm("hand out different tokens", {"tokens": tokens})
        return found

    def report(self) -> InferenceReport:
        """Return the compiles, calls and tokens per second so far, and how the weights are stored."""
        quantization = getattr(self.module, "quantization", None)
        counts = self._graphs.counts()
        return InferenceReport(
            prompt=counts["prompt"],
            decode=counts["decode"],
            forward=counts["forward"],
            encode=counts["encode"],
            uncompiled=counts["uncompiled"],
            buckets=self._buckets,
            cache_bytes=self._pool.nbytes(),
            quantization=quantization,
            whole_weights={} if quantization is None else whole_weights(self.module),
            turned_weights=turned_weights(self.module),
        )

    def _whole(self, whole: dict[str, Tensor], labels: Tensor | None) -> dict[str, Any]:
        """Return the model's output tensors for whole sequences, padded to a bucket; padded labels are ignored."""
        unknown = [name for name in (*whole, *(() if labels is None else ("labels",))) if name not in self._takes]
        if unknown:
            raise InferenceError(f"engine: the forward of {type(self.module).__name__} takes no {unknown[0]}")
        given: dict[str, Any] = {**self._behind(whole), "use_cache": False}
        if labels is not None:
            given["labels"] = functional.pad(
                labels, (0, self._bucket(labels.shape[1]) - labels.shape[1]), value=_IGNORED
            )
        confirmed = whole if labels is None else {**whole, "labels": labels}
        with self._turns:
            if self._ranks is not None:
                self._ranks.confirm("compute different batches", confirmed)
            tokens = whole.get(f"{self._prefix}input_ids", whole["input_ids"]).numel()
            found = self._graphs.run("forward", given, tokens=tokens)
        return {name: found[name] for name in ("loss", "logits") if name in found}

    def _defaults(self) -> Any:
        """Return the model's `generation_config` without its kind of cache, which the engine's cache replaces."""
        own = self.module.generation_config
        if own.cache_implementation is None:
            return own
        found = copy.copy(own)
        found.cache_implementation = None
        return found

    def _drawn_from(self, input_ids: Tensor, arguments: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """Return everything that determines the generated tokens."""
        found = {"input_ids": input_ids, **arguments, "generation_config": config.to_dict()}
        if arguments.get("do_sample", config.do_sample):
            is_cuda = input_ids.is_cuda
            found["random state"] = torch.cuda.get_rng_state(input_ids.device) if is_cuda else torch.get_rng_state()
        return found

    def _with_own_forward(self, module: Any) -> Any:
        """Return a shallow copy, which shares all parts and parameters, so that the user's model keeps its forward."""

        @functools.wraps(module.forward)  # transformers reads the names of its arguments
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._serve(*args, **kwargs)

        serving = copy.copy(module)
        object.__setattr__(serving, "forward", forward)
        return serving

    def _prompt_length(self, input_ids: Tensor, arguments: Mapping[str, Any]) -> int:
        """Return the number of tokens in the cache before the first generated one."""
        del arguments
        return input_ids.shape[1]

    def _serve(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Return the output of a forward that `generate` calls: a prompt first, then one token a row."""
        cache = others.pop(CACHE_NAME, None)
        given: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        if input_ids is None or not isinstance(cache, RewindableCache):
            return self._plain({**given, **others}, cache)
        self._refuse(others)
        rows, length = input_ids.shape
        self._refuse_several(length, cache)
        given["attention_mask"] = padding.mask_of_all(
            attention_mask, input_ids, filled=cache.filled, positions=self.max_tokens
        )
        if "position_ids" in self._takes:
            if position_ids is None:
                position_ids = torch.arange(cache.filled, cache.filled + length, device=input_ids.device)[None]
            given["position_ids"] = position_ids.expand(rows, length).contiguous()
        else:
            del given["position_ids"]
        return self._step(given, cache)

    def _plain(self, given: Mapping[str, Any], cache: Any) -> Any:
        """Run the model itself for a forward that is not the next token of the engine's cache."""
        found = {name: value for name, value in given.items() if value is not None}
        if self._ranks is not None:
            raise InferenceError(
                f"generate: a forward of {', '.join(sorted(found))} without the engine's cache, such as that of "
                "guidance_scale or use_cache=False, cannot be computed where ranks share the layers: leave it out, or "
                "use mp_size=1"
            )
        if cache is not None:
            found[CACHE_NAME] = cache
        ids = found.get(f"{self._prefix}input_ids")
        return self._graphs.run_plain(found, tokens=0 if ids is None else ids.numel())

    def _refuse_several(self, length: int, cache: Any) -> None:
        if cache.filled and length > 1:
            raise InferenceError(
                f"generate: {length} tokens at once after a prompt, but the engine takes one: leave out "
                "prefill_chunk_size and other ways of decoding several tokens"
            )
        if cache.filled + length > self.max_tokens:
            raise InferenceError(f"generate: it exceeds max_tokens={self.max_tokens}: give init_inference a larger one")

    def _step(self, given: dict[str, Any], cache: Any) -> Any:
        """Run one of the two graphs: that of a prompt, if there was none yet, or that of one token a row."""
        rows, length = given[f"{self._prefix}input_ids"].shape
        if cache.filled:
            logits = self._graphs.run("decode", {**given, CACHE_NAME: cache}, tokens=rows)
        else:
            last = torch.tensor([length - 1], device=given[f"{self._prefix}input_ids"].device)
            padded = {**self._padded(given), CACHE_NAME: cache}
            logits = self._graphs.run("prompt", padded, last, tokens=rows * length)
            cache.rewind(length)
        cache.filled += length
        return self._outputs(**{"logits": logits, CACHE_NAME: cache})

    def _padded(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Pad a prompt on its right. Padding sees what the last token sees; the last token does not see padding."""
        ids, mask = (given[self._prefix + name] for name in ("input_ids", "attention_mask"))
        behind = self._bucket(ids.shape[1]) - ids.shape[1]
        found = {
            **given,
            f"{self._prefix}input_ids": functional.pad(ids, (0, behind)),
            f"{self._prefix}attention_mask": padding.with_queries_behind(mask, behind),
        }
        if "position_ids" in given:
            positions = given["position_ids"]
            found["position_ids"] = torch.cat([positions, positions[:, -1:].expand(-1, behind)], 1)
        return found

    def _behind(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pad tensors (rows, length) with zeros to a bucket."""
        return {
            name: functional.pad(value, (0, self._bucket(value.shape[1]) - value.shape[1]))
            for name, value in whole.items()
        }

    def _refuse(
        self,
        others: Mapping[str, Any],
        known: Mapping[str, tuple[Any, ...]] = MappingProxyType(
            {"use_cache": (True,), "return_dict": (True,), "logits_to_keep": (1,)}
        ),
        *,
        where: str = "generate",
    ) -> None:
        for name, value in others.items():
            if not any(value is empty for empty in _EMPTY) and not any(value is each for each in known.get(name, ())):
                raise InferenceError(
                    f"{where}: {name}={_short(value)} is not supported: the engine's graphs return logits alone, of "
                    f"tokens; call engine.module{'.generate' if where == 'generate' else ''}"
                )

    def _new_cache(self, rows: int) -> RewindableCache | EncoderDecoderMemory:
        model: nn.Module = self.module
        (device,) = {param.device for param in model.parameters()}
        return new_cache(
            **{"config": self.module.config, "rows": rows, "max_tokens": self.max_tokens},
            **{"dtype": self.module.dtype, "device": device, "ranks": self._ranks},
        )

    def _bucket(self, length: int) -> int:
        for bucket in self._buckets:
            if length <= bucket:
                return bucket
        raise InferenceError(f"{length} tokens exceed max_tokens={self.max_tokens}: give init_inference a larger one")


def _short(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)

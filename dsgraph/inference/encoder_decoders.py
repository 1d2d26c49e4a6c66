"""An engine of models whose encoder reads a sequence and whose decoder generates another, such as T5."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from dsgraph.utils.errors import InferenceError

from .cache import CACHE_NAME, EncoderDecoderMemory
from .engine import InferenceEngine
from .padding import mask_of_all


class EncoderDecoderEngine(InferenceEngine):
    """The engine of a model with an encoder and a decoder.

    transformers' `generate` calls the encoder once, which is a graph for each padded length, then the decoder. The
    decoder's first call writes keys and values of the encoder's output into a separate cache. `max_tokens` limits
    encoder input and generated tokens separately.
    """

    _prefix = "decoder_"
    _outputs = Seq2SeqLMOutput

    def __call__(  # type: ignore[override]  # a decoder has its own tokens
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Return the logits of whole sequences, computed without a cache.

        Args:
            input_ids: (rows, length) to encode, of at most `max_tokens` tokens.
            attention_mask: (rows, length): 0 where a token is padding. None: none is.
            decoder_input_ids: (rows, length of the decoder), of at most `max_tokens` tokens. None: they are made of the
                labels.
            labels: (rows, length of the decoder): tokens for the loss, -100 for ignored positions. None: no loss.
            **others: `use_cache=False`, `return_dict=True`, and arguments that are None.

        Returns:
            `logits` (rows, length of the decoder, vocabulary) of the model, and `loss` if labels are given.

        Raises:
            InferenceError: The sequences are too long, the decoder has none, or an argument is not supported.
        """
        self._refuse(others, {"use_cache": (False,), "return_dict": (True,)}, where="engine")
        for_decoder = labels if decoder_input_ids is None else decoder_input_ids
        if for_decoder is None:
            raise InferenceError("engine: decoder_input_ids is missing: give the decoder's tokens, or call generate")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        whole = {"input_ids": input_ids, "attention_mask": attention_mask}
        whole |= {} if decoder_input_ids is None else {"decoder_input_ids": decoder_input_ids}
        found = self._whole(whole, labels)
        return Seq2SeqLMOutput(**{**found, "logits": found["logits"][:, : for_decoder.shape[1]]})

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **arguments: Any) -> Any:
        """Return what the model's `generate` returns for these arguments, token for token.

        Args:
            inputs: (rows, length) to encode, also as `input_ids=`. Sequences of several lengths are padded, with an
                `attention_mask`.
            generation_config: transformers' `GenerationConfig`; None: the model's.
            **arguments: Those of transformers' `generate`.

        Raises:
            InferenceError: More tokens than `max_tokens`, or an argument that needs another cache or more outputs.
        """
        if arguments.get("encoder_outputs") is not None:
            raise InferenceError("generate: encoder_outputs is not supported: the engine encodes input_ids itself")
        return super().generate(inputs, generation_config, **arguments)

    def _prompt_length(self, input_ids: Tensor, arguments: Mapping[str, Any]) -> int:
        del input_ids
        begun = arguments.get("decoder_input_ids")
        return 1 if begun is None else begun.shape[1]

    def _with_own_forward(self, module: Any) -> Any:
        serving = super()._with_own_forward(module)
        encoder = copy.copy(module.get_encoder())

        @functools.wraps(encoder.forward)  # transformers reads the names of its arguments
        def forward(input_ids: Tensor, attention_mask: Tensor, **others: Any) -> BaseModelOutput:
            self._refuse(others)
            rows, length = input_ids.shape
            given = self._behind({"input_ids": input_ids, "attention_mask": attention_mask})
            hidden = self._graphs.run("encode", given, tokens=rows * length)
            return BaseModelOutput(last_hidden_state=hidden[:, :length])

        object.__setattr__(encoder, "forward", forward)
        object.__setattr__(serving, "get_encoder", lambda *_args, **_kwargs: encoder)
        return serving

    def _serve(  # type: ignore[override]  # that of an encoder and a decoder has other arguments
        self,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | dict[str, Tensor] | None = None,
        **others: Any,
    ) -> Any:
        """Return the output of a forward that `generate` calls: the decoder's first tokens, then one token a row."""
        cache = others.pop(CACHE_NAME, None)
        given: dict[str, Any] = {
            **{"decoder_input_ids": decoder_input_ids, "encoder_outputs": encoder_outputs},
            **{"attention_mask": attention_mask, "decoder_attention_mask": decoder_attention_mask},
        }
        is_own = isinstance(cache, EncoderDecoderMemory)
        if not is_own or decoder_input_ids is None or encoder_outputs is None or attention_mask is None:
            return self._plain({**given, **others}, cache)
        self._refuse(others)
        self._refuse_several(decoder_input_ids.shape[1], cache)
        hidden = encoder_outputs[0]
        if cache.filled:
            # The cache has keys and values of all that was encoded. The decoder asks whether there is an encoder.
            hidden = hidden[:, :1].contiguous()
        else:
            hidden = functional.pad(hidden, (0, 0, 0, self._bucket(hidden.shape[1]) - hidden.shape[1]))
            behind = self.max_tokens - attention_mask.shape[1]
            cache.of_encoder = {"attention_mask": functional.pad(attention_mask, (0, behind)).bool()[:, None, None]}
        given["decoder_attention_mask"] = mask_of_all(
            decoder_attention_mask, decoder_input_ids, filled=cache.filled, positions=self.max_tokens
        )
        return self._step({**given, "encoder_outputs": (hidden,), **cache.of_encoder}, cache)

    def _new_cache(self, rows: int) -> EncoderDecoderMemory:
        return EncoderDecoderMemory(super()._new_cache(rows), super()._new_cache(rows))

    def _padded(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the padded arguments; the one token with which a decoder usually begins is not padded."""
        return dict(given) if given["decoder_input_ids"].shape[1] == 1 else super()._padded(given)

"""Generation across the stages of a pipeline, by transformers' own `generate`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dsgraph.utils.errors import OptionError, PartitionError

Evaluate = Callable[..., Tensor]
"""Takes a position, and the arguments of `evaluate`; returns the logits there (rows, vocabulary), on all ranks."""

_FILLED = ("input_ids", "attention_mask", "position_ids", "labels")
_OWNED = ("use_cache", "synced_gpus", "inputs", "inputs_embeds")
# Arguments that transformers passes to a forward, besides those above, with the values that have no effect here.
_WITHOUT_EFFECT = {"use_cache": (False,), "return_dict": (True,), "logits_to_keep": (1,)}


class Generation:
    """A causal model of transformers whose forward is an evaluation of all stages.

    There is no cache: each new token costs an evaluation of a complete batch, at the length of the example. Sequences
    are padded on the right, which a causal model does not see.
    """

    def __init__(
        self,
        model: nn.Module | PartitionError,
        example: tuple[tuple[Any, ...], Mapping[str, Any]],
        *,
        microbatches: int,
    ) -> None:
        """Set up from parts.

        Args:
            model: The model without values, see `without_values`; or why there is none.
            example: Arguments of one micro-batch.
            microbatches: Number of micro-batches of a batch.
        """
        self._model, (self._args, self._example), self._count = model, example, microbatches
        self._is_causal = False

    def check(self, input_ids: Tensor, arguments: Mapping[str, Any]) -> bool:
        """Check the arguments of `generate`. Return True if it draws random numbers.

        Raises:
            OptionError: The model cannot generate, the example has no `input_ids`, or an argument does not fit.
            PartitionError: The model cannot be copied.
        """
        if isinstance(self._model, PartitionError):
            raise self._model
        model: Any = self._model
        if not callable(getattr(model, "generate", None)) or model.config.is_encoder_decoder:
            raise OptionError(f"pipeline.generate: {type(model).__name__} is no causal language model of transformers")
        like = self._example.get("input_ids")
        if self._args or not isinstance(like, Tensor):
            raise OptionError(
                "pipeline.generate: it fills arguments by name: make the pipeline with example_kwargs, which contain "
                "input_ids, and without example_inputs"
            )
        for name, value in self._example.items():
            if isinstance(value, Tensor) and name not in _FILLED:
                raise OptionError(
                    f"pipeline.generate: it cannot fill the argument {name!r} of the example: make the pipeline with "
                    f"{', '.join(_FILLED)} only"
                )
        for name in _OWNED:
            if arguments.get(name) is not None:
                raise OptionError(f"pipeline.generate: {name} is not supported across stages: leave it out")
        length, new = input_ids.shape[1], arguments.get("max_new_tokens")
        if length + (new or 1) > like.shape[1]:
            raise OptionError(
                f"pipeline.generate: a prompt of {length} tokens and max_new_tokens={new} exceed the length of the "
                f"example, which is {like.shape[1]}: make the pipeline with a longer example"
            )
        config = arguments.get("generation_config") or model.generation_config
        return bool(arguments.get("do_sample", config.do_sample))

    def run(self, input_ids: Tensor, arguments: Mapping[str, Any], evaluate: Evaluate, *, is_synced: bool) -> Any:
        """Return what the model's `generate` returns.

        Args:
            input_ids: (rows, length).
            arguments: Those of transformers' `generate`, after `check`.
            evaluate: Evaluates the stages.
            is_synced: True if ranks with other prompts must call `evaluate` together with this one.
        """
        model: Any = self._model

        @functools.wraps(model.forward)  # transformers reads the names of its arguments
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(evaluate, *args, **kwargs)

        serving = copy.copy(model)
        object.__setattr__(serving, "forward", forward)
        return serving.generate(input_ids, **{**arguments, "use_cache": False, "synced_gpus": is_synced})

    def _forward(
        self,
        evaluate: Evaluate,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Return the logits of the last token, as transformers' `generate` expects them."""
        from transformers.modeling_outputs import CausalLMOutput

        for name, value in others.items():
            if value is not None and value is not False and value not in _WITHOUT_EFFECT.get(name, ()):
                raise OptionError(f"pipeline.generate: {name}={value!r} is not supported: stages return logits alone")
        rows, length = input_ids.shape
        most, longest = self._count * self._example["input_ids"].shape[0], self._example["input_ids"].shape[1]
        if rows > most or length > longest:
            raise OptionError(
                f"pipeline.generate: {rows} sequences of {length} tokens exceed the batch of the pipeline, {most} of "
                f"{longest}: give fewer or shorter prompts, or fewer beams"
            )
        given = self._filled(input_ids, attention_mask, position_ids)
        logits = evaluate(length - 1, **given)
        if not self._is_causal:
            given["input_ids"] = given["input_ids"].clone()
            given["input_ids"][:, length:] = 1  # instead of 0
            difference = (evaluate(length - 1, **given) - logits).abs().max()
            model: Any = self._model
            rounding = max(1e-3, 2 * torch.finfo(model.dtype).eps) * logits.abs().max()
            if difference > rounding:
                raise OptionError(
                    "pipeline.generate: logits depend on the tokens that follow, but only a causal model can generate "
                    "across stages: generate without stages"
                )
            self._is_causal = True
        return CausalLMOutput(logits=logits[:rows, None])

    def _filled(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> dict[str, Any]:
        """Return the arguments for a complete batch, with rows and padding on the right that no result depends on."""
        like = self._example["input_ids"]
        rows, length = ids.shape
        if mask is not None and not mask.all():
            needed = ["attention_mask"] + ["position_ids"] * (positions is not None)
            for name in needed:
                if name not in self._example:
                    raise OptionError(
                        f"pipeline.generate: prompts with padding need the argument {name!r}, and the example has "
                        "none: make the pipeline with it, or give prompts of one length"
                    )
        mask = torch.ones_like(ids) if mask is None else mask
        positions = torch.arange(length, device=ids.device).expand(rows, length) if positions is None else positions
        after = torch.arange(1, like.shape[1] - length + 1, device=ids.device)
        full = {
            "input_ids": functional.pad(ids, (0, len(after))),
            "attention_mask": functional.pad(mask, (0, len(after)), value=1),
            "position_ids": torch.cat([positions, positions[:, -1:] + after], 1),
        }
        full["labels"] = full["input_ids"]  # the loss is not used
        chosen = [*range(rows), *[0] * (self._count * like.shape[0] - rows)]
        return {
            name: full[name][chosen].to(value.dtype) if name in full else value for name, value in self._example.items()
        }

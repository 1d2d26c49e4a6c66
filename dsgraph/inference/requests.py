"""Checks the arguments of an engine's `generate` before transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dsgraph.utils.errors import InferenceError

from .cache import CACHE_NAMES

_INSTEAD = "call engine.module.generate"
_OWNED = (*CACHE_NAMES, "cache_implementation", "inputs_embeds")
# Arguments of decoding methods that decode several tokens at once, or need other outputs than logits.
_SEARCHES = (
    *("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "custom_generate", "penalty_alpha"),
    *("dola_layers", "force_words_ids", "constraints"),
)


def prompt_of(inputs: Tensor | None, arguments: dict[str, Any]) -> Tensor:
    """Return the prompt (`inputs` or `input_ids`), and remove it from `arguments`.

    Raises:
        InferenceError: There is no prompt, there are two, or it is not a tensor (rows, length).
    """
    named = arguments.pop("input_ids", None)
    if inputs is not None and named is not None:
        raise InferenceError("generate: inputs and input_ids are the same argument: leave one out")
    found = inputs if named is None else named
    if found is None and arguments.get("inputs_embeds") is None:
        raise InferenceError("generate: input_ids is missing: give the tokens of a prompt, (rows, length)")
    if found is not None and (not isinstance(found, Tensor) or found.ndim != 2):
        raise InferenceError(
            f"generate: input_ids is {_kind(found)}; it takes a tensor (rows, length), such as that of "
            'tokenizer(text, return_tensors="pt")'
        )
    return found  # type: ignore[return-value]  # refuse() names inputs_embeds


def refuse(arguments: Mapping[str, Any], config: Any) -> None:
    """Refuse arguments that need another cache than the engine's, other outputs, or several tokens at once.

    Args:
        arguments: Those of `generate`.
        config: The `generation_config` of this call; None: the model's default, whose kind of cache the engine's
            cache replaces.

    Raises:
        InferenceError: `arguments` contains such an argument.
    """
    for name in (*_OWNED, *_SEARCHES):
        value = setting(name, arguments, config)
        if value is not None and value is not False:
            raise InferenceError(
                f"generate: {name} is not supported: the engine owns the cache, and its graphs give the logits of one "
                f"token at a time; {_INSTEAD}"
            )


def setting(name: str, arguments: Mapping[str, Any], config: Any) -> Any:
    """Return a setting of `generate` from its arguments, or else from a `generation_config`."""
    found = arguments.get(name)
    return getattr(config, name, None) if found is None else found


def copies(arguments: Mapping[str, Any], config: Any) -> int:
    """Return the number of batch rows per prompt: beams, or sequences to return."""
    return max(setting(name, arguments, config) or 1 for name in ("num_beams", "num_return_sequences"))


def check_length(prompt: int, arguments: Mapping[str, Any], config: Any, *, most: int) -> None:
    """Check that a prompt and the new tokens fit in the cache.

    Args:
        prompt: Tokens that are in the cache before the first generated one.
        arguments: Those of `generate`.
        config: The `generation_config` in effect.
        most: Number of positions of the cache.

    Raises:
        InferenceError: They do not fit.
    """
    new = setting("max_new_tokens", arguments, config)
    if new is not None and prompt + new > most:
        raise InferenceError(
            f"generate: a prompt of {prompt} tokens and max_new_tokens={new} exceed "
            f"max_tokens={most}: give init_inference a larger one"
        )


def _kind(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"

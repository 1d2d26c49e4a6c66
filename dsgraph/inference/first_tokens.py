"""Comparison of the first tokens of an engine with those of its model, before the engine is returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.utils.errors import InferenceError

from .gate import layer_of, text_config, windows

_NEW = 3
"""Tokens to generate."""
_SHORT, _LONGEST, _LONGEST_UNKNOWN = 12, 256, 1024
"""Prompt lengths: default; longest to exceed a window whose mask transformers makes; longest for other windows."""
_KNOWN = ("sliding_window", "attention_chunk_size")
"""Kinds of windows whose mask transformers makes from the cache."""
_PADDED = 2
"""Tokens of padding before the first of two prompts."""
# Largest allowed difference of logits relative to their spread; it covers another order of summation, no more.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_16_BITS = 0.2
_SKIP = "verify=False skips this comparison"


def verify(model: Any, make: Callable[[int], Any], *, most: int) -> None:
    """Generate a few tokens with the model and with an engine, uncompiled, and compare the logits.

    Two prompts, the first one padded, are longer than the model's attention windows if these are short. The model
    is in evaluation mode meanwhile. Nothing is compiled.

    Args:
        model: A model of transformers, with weights.
        make: Return an engine of the model for a number of positions.
        most: Number of positions that the model supports.

    Raises:
        InferenceError: The engine does not give the model's logits, or cannot compute them.
    """
    length = _length(model, most)
    if length < _PADDED + 1:
        return
    with _evaluating(model):
        given = _prompts(model, length)
        try:
            expected = _logits(model.generate, model, given, cache_implementation="dynamic")
        except Exception as error:
            raise InferenceError(
                f"init_inference: {type(model).__name__} cannot be verified, because its own generate fails: "
                f"{_first(error)}; {_SKIP}"
            ) from error
        try:
            engine = make(length + _NEW)
            with engine._graphs.uncompiled():
                found = _logits(engine.generate, model, given)
        except Exception as error:
            raise InferenceError(
                f"init_inference: {type(model).__name__} is not supported: with a static cache of keys and values the "
                f"forward of its {layer_of(model)} fails: {_first(error)}. Call model.generate"
            ) from error
    _compare(model, found, expected)


def _length(model: Any, most: int) -> int:
    found = _SHORT
    for name, size in windows(text_config(model)).items():
        beyond, is_known = size + _PADDED + 1, name in _KNOWN
        if beyond <= (_LONGEST if is_known else _LONGEST_UNKNOWN):
            found = max(found, beyond)
        elif not is_known and size < most:
            raise InferenceError(
                f"init_inference: {type(model).__name__} cannot be verified: its config has {name}={size}, and a "
                f"prompt of more than {_LONGEST_UNKNOWN} tokens would be needed to compare its masks. Use "
                f"max_tokens={size} or less, or compare tokens yourself: {_SKIP}"
            )
    return min(found, most - _NEW)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _prompts(model: Any, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    words = text_config(model).vocab_size
    (device,) = {param.device for param in model.parameters()}
    ids = torch.randint(min(3, words - 1), words, (2, length), generator=generator).to(device)
    mask = torch.ones_like(ids)
    mask[0, :_PADDED] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _logits(generate: Callable[..., Any], model: Any, given: dict[str, Tensor], **others: Any) -> tuple[Any, Any]:
    """Return the generated tokens and the logits of each step."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        **{"max_new_tokens": _NEW, "do_sample": False, "num_beams": 1, "num_return_sequences": 1},
        **{"return_dict_in_generate": True, "output_logits": True, "output_scores": False},
        **{"pad_token_id": model.generation_config.pad_token_id or 0, **others},
    )
    found = generate(**given, generation_config=config)
    return found.sequences, found.logits


def _compare(model: Any, found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE_16_BITS)
    count = len(expected[1])
    for step in range(count):
        end = expected[0].shape[1] - count + step
        if not torch.equal(found[0][:, :end], expected[0][:, :end]):
            return  # two candidates were nearly equal: later tokens and logits differ
        one, other = (torch.nan_to_num(each[1][step].float(), neginf=0, posinf=0) for each in (found, expected))
        distance = float((one - other).norm() / (other - other.mean(-1, keepdim=True)).norm().clamp(min=1e-12))
        if distance > tolerance:
            config = text_config(model)
            kinds = ", ".join(sorted(set(getattr(config, "layer_types", None) or ["full_attention"])))
            raise InferenceError(
                f"init_inference: {type(model).__name__} is not supported: with a static cache of keys and values the "
                f"logits of token {step + 1} differ from the model's by {distance:.1%} of their spread "
                f"({layer_of(model)}, layers of type {kinds}). Call model.generate; {_SKIP}"
            )


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

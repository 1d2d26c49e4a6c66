"""Checks which models an engine supports, by their caches, masks and positions, not by their names."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from dsgraph.utils.errors import InferenceError

ENCODERS = ("bert",)
"""Values of `config.model_type` of encoders, which do not generate."""
ENCODER_DECODERS = ("t5",)
"""Values of `config.model_type` of encoder-decoder models."""
_CACHED = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""transformers' classes of cache layers that store one key and one value per token."""
_ATTENTION = ("sdpa", "eager")
"""Implementations of attention that accept a mask over all scores."""


def refuse_model(model: Any) -> None:
    """Raise an error for a model that no engine supports.

    Raises:
        InferenceError: The model is not supported; the message names the layer or the part of the model.
    """
    reason = _why_not(model)
    if reason is not None:
        family = getattr(getattr(model, "config", None), "model_type", None)
        raise InferenceError(
            f"init_inference: {type(model).__name__} (model_type {family!r}) is not supported: {reason}"
        )


def windows(config: Any) -> dict[str, int]:
    """Return the lengths of windows and chunks of attention that a configuration names, by field."""
    names = [name for name in vars(config) if "window" in name or name == "attention_chunk_size"]
    found = {name: getattr(config, name) for name in names if not name.startswith(("use_", "max_"))}
    return {name: size for name, size in found.items() if isinstance(size, int) and not isinstance(size, bool)}


def layer_of(model: nn.Module) -> str:
    """Return the class name of the model's first layer, for messages."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0)
    first = next(lists, None)
    return type(model).__name__ if first is None else type(first[0]).__name__


def text_config(model: Any) -> Any:
    """Return the configuration of the part of a model that generates text."""
    return model.config.get_text_config(decoder=True)


def _why_not(model: Any) -> str | None:
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "can_generate") or not hasattr(config, "get_text_config"):
        return "it is not a model of transformers"
    family = config.model_type
    if family in ENCODERS:
        # Models for multiple choice have input_ids of three dimensions.
        if model.can_generate() or config.is_decoder or "MultipleChoice" in type(model).__name__:
            return f"of {family!r} only encoders with input_ids of shape (rows, length) are supported"
        return None
    if not model.can_generate():
        return (
            "it generates no tokens: use its class with a language-model head, such as AutoModelForCausalLM returns. "
            f"Supported types of encoders: {', '.join(ENCODERS)}"
        )
    if config.is_encoder_decoder:
        if family in ENCODER_DECODERS:
            return None
        return f"supported types of encoder-decoder models: {', '.join(ENCODER_DECODERS)}. Call model.generate"
    return _why_not_causal(model)


def _why_not_causal(model: Any) -> str | None:
    # Imported here because dsgraph works without transformers elsewhere.
    from transformers import DynamicCache

    from .cache import CACHE_NAME

    if getattr(model, "_is_stateful", False) or CACHE_NAME not in inspect.signature(model.forward).parameters:
        return f"its layers, such as {layer_of(model)}, keep a state that is not a key-value cache: call model.generate"
    config = text_config(model)
    kinds = getattr(config, "layer_types", None) or []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer).__name__ not in _CACHED:
            kind = repr(kinds[index]) if index < len(kinds) else type(layer).__name__
            return f"layer {index}, of type {kind}, keeps a state that is not a key-value cache: call model.generate"
    spelled = getattr(config, "_attn_implementation", None) or "eager"
    if spelled not in _ATTENTION:
        return (
            f"its attention {spelled!r} does not support the mask of a static cache: call "
            f'model.set_attn_implementation("{_ATTENTION[0]}") first'
        )
    return _why_not_positions(model)


def _why_not_positions(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        for each in kind.values() if isinstance(kind, dict) else (kind,):
            if isinstance(each, str) and "dynamic" in each:
                return (
                    f"the rotary embedding {name!r} has rope_type {each!r}, which recomputes its frequencies from the "
                    'length of each sequence: call model.generate, or choose another rope_type, such as "yarn"'
                )
    return None

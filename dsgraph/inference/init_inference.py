"""`init_inference`: an engine with compiled graphs from a model of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from dsgraph.compiler.options import parse_options
from dsgraph.passes.parallel.find_slices import FoundSlices
from dsgraph.utils.errors import InferenceError

from .arguments import DTYPES, merged
from .checkpoints import find_weights, from_transformers, load_weights, names_of_weights, prefix_of
from .first_tokens import verify as verify_logits
from .gate import ENCODER_DECODERS, ENCODERS, refuse_model
from .quantization.quantize import (
    DESCRIPTION,
    GROUP,
    Quantization,
    check_groups,
    linear_layers,
    quantize,
    read_description,
)
from .quantization.quantized_layers import Rounding, put_empty_layers, with_empty_layers
from .slice_layers import plan_layers, slice_layers
from .slicing_ranks import SlicingRanks, all_ranks
from .weight_layouts import turn_weights
from .weight_sources import engine_folder, open_source

if TYPE_CHECKING:
    from .engine import InferenceEngine

_BITS = {"int8": 8, "int4": 4}


def init_inference(
    model: nn.Module,
    config: Mapping[str, Any] | None = None,
    *,
    mp_size: int = 1,
    dtype: torch.dtype | str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    quantize: Literal["int8", "int4"] | None = None,
    max_tokens: int | None = None,
    replace_with_kernel_inject: bool = True,
    options: dict[str, Any] | None = None,
    verify: bool = True,
    **others: Any,
) -> InferenceEngine:
    """Return an engine that generates with a static cache and compiled graphs, or encodes, for a transformers model.

    The model goes to `eval()`; `dtype`, `quantize`, `mp_size` and `checkpoint` may change it in place. On a CPU without
    other ranks the weights of its `Conv1D` layers, unless float16, are stored by columns in new memory.

    Args:
        model: An unmodified model of transformers: a causal one with a key-value cache, T5 or BERT; it may be on the
            meta device if there is a checkpoint.
        config: A dict of arguments, as in DeepSpeed; each may be given in it or as an argument.
        mp_size: Number of ranks that share each layer: all ranks of the run, which make the same calls of the engine.
        dtype: torch.float32, torch.bfloat16 or torch.float16, or a name such as "fp16". None: that of the model, or of
            the checkpoint.
        checkpoint: A folder of safetensors from transformers, in one or several files, or from `save_quantized`; or of
            a training engine's checkpoints. Ranks that share layers read only their slices.
        quantize: "int8" or "int4" quantizes the weights, see `dsgraph.quantize`, which has more arguments.
        max_tokens: Positions of the key-value cache: prompt and generated tokens together. For T5, the limit of encoder
            input and generated tokens separately; for BERT, of a sequence. Default: 1024, or the model's number of
            positions if that is less.
        replace_with_kernel_inject: True replaces sequences of small ops by dsgraph's kernels.
        options: Options of the backend, such as {"codegen": "eager"}, see `BackendOptions`.
        verify: Generate three tokens with the model and with the engine, and compare the logits, before the model is
            changed. Nothing is compiled for it. A model on the meta device is compared once it has weights, and not at
            all if ranks share it.
        **others: DeepSpeed's names: `tensor_parallel={"tp_size": n}` or `tp=` for mp_size, `max_out_tokens` for
            max_tokens, `kernel_inject` for replace_with_kernel_inject.

    Returns:
        The engine.

    Raises:
        InferenceError: The model, or an argument, is not supported; nothing was changed.
        OptionError: An option of the backend is wrong.
    """
    own = {
        **{"mp_size": mp_size, "dtype": dtype, "checkpoint": checkpoint, "quantize": quantize},
        **{"max_tokens": max_tokens, "options": options, "replace_with_kernel_inject": replace_with_kernel_inject},
        "verify": verify,
    }
    return _engine(model, **merged(own, config, others))


def _engine(
    model: Any,
    *,
    mp_size: int,
    dtype: torch.dtype | None,
    checkpoint: str | os.PathLike[str] | None,
    quantize: Literal["int8", "int4"] | None,
    max_tokens: int | None,
    replace_with_kernel_inject: bool,
    options: dict[str, Any] | None,
    verify: bool,
) -> InferenceEngine:
    given = dict(options or {})
    if not replace_with_kernel_inject:
        if "kernels" in given:
            raise InferenceError(
                "init_inference: options has kernels, but replace_with_kernel_inject is False: leave one out"
            )
        given["kernels"] = "none"
    parse_options(given)
    _refuse(model, mp_size=mp_size, dtype=dtype, quantized=quantize, verify=verify)
    positions = _positions(model, max_tokens)
    folder = _folder(checkpoint, model, quantized=quantize)
    device = _device(model, folder)
    ranks = all_ranks(mp_size, device) if mp_size > 1 else None
    few = _few_bits(model, folder, quantize)
    plan = plan_layers(model, ranks, few) if ranks is not None else None
    is_meta = next(model.parameters()).is_meta
    if verify and not is_meta:
        _verify(model, positions, given)
    if folder is not None and (ranks is not None or _is_ours(folder)):
        _fill(model, folder, few, plan, dtype=dtype, device=device, ranks=ranks)
    else:
        if folder is not None:  # transformers knows how names have changed
            model = from_transformers(model, folder).to(device)
        model = model if dtype is None else model.to(dtype)
        if quantize is not None:
            _quantized(model, _BITS[quantize])
        if ranks is not None and plan is not None:
            slice_layers(model, ranks, plan)
    if verify and is_meta and ranks is None:
        _verify(model, positions, given)
    if device.type == "cpu" and ranks is None and given.get("kernels") != "none":
        turn_weights(model)
    return _engine_type(model)(model.eval(), max_tokens=positions, options=given, ranks=ranks)


def _verify(model: Any, positions: int, options: Mapping[str, Any]) -> None:
    if model.config.model_type not in ENCODERS:
        kind = _engine_type(model)
        verify_logits(model, lambda most: kind(model, max_tokens=most, options=options), most=positions)


def _fill(
    model: Any,
    folder: Path,
    few: Quantization | None,
    plan: FoundSlices | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    ranks: SlicingRanks | None,
) -> None:
    """Read a folder into a model, one weight at a time."""
    rounding = None
    with ExitStack() as stack:
        source = open_source(folder, stack)
        if few is not None and not (folder / DESCRIPTION).exists():
            rounding = Rounding(model, few, names_of_weights(model))
            source = rounding.source(source, dtype=dtype, device=device, prefix=prefix_of(model), folder=folder)
        # What is missing is found before anything of the model changes.
        find_weights(model if few is None else with_empty_layers(model, few), source, folder=folder, ranks=None)
        if few is not None:
            put_empty_layers(model, few)
        if ranks is not None and plan is not None:
            slice_layers(model, ranks, plan)
        load_weights(model, source, folder=folder, dtype=dtype, device=device, ranks=ranks)
    if few is not None:
        object.__setattr__(model, "quantization", few if rounding is None else rounding.how)


def _few_bits(model: Any, folder: Path | None, quantized: Literal["int8", "int4"] | None) -> Quantization | None:
    """Return which layers are quantized, or will be."""
    own: Quantization | None = getattr(model, "quantization", None)
    if own is not None or (folder is not None and (folder / DESCRIPTION).exists()):
        return own if folder is None else read_description(model, folder)
    if quantized is None:
        return None
    bits: Any = _BITS[quantized]
    layers, group = linear_layers(model), GROUP if bits == 4 else 0
    check_groups(layers, bits=bits, group=group)
    return Quantization(bits, group, dict.fromkeys(layers, 0.0), 0, 0)


def _is_ours(folder: Path) -> bool:
    """Return whether a folder was written by `save_quantized` or a training engine."""
    return (folder / DESCRIPTION).exists() or engine_folder(folder) is not None


def _engine_type(model: Any) -> type[InferenceEngine]:
    # These import transformers, which dsgraph does without elsewhere.
    from .encoder_decoders import EncoderDecoderEngine
    from .encoders import EncoderEngine
    from .engine import InferenceEngine

    others: dict[str, type[InferenceEngine]] = {
        **dict.fromkeys(ENCODERS, EncoderEngine),
        **dict.fromkeys(ENCODER_DECODERS, EncoderDecoderEngine),
    }
    return others.get(model.config.model_type, InferenceEngine)


def _device(model: nn.Module, folder: Path | None) -> torch.device:
    """Return the device on which the model computes; for a model on the meta device, the current one."""
    (device,) = {param.device for param in model.parameters()}
    if device.type != "meta":
        return device
    if folder is None:
        raise InferenceError("init_inference: the model is on the meta device, and there is no checkpoint to fill it")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _quantized(model: nn.Module, bits: int) -> None:
    quantize(model, bits=bits)


def _refuse(model: Any, *, mp_size: int, dtype: object, quantized: object, verify: object) -> None:
    refuse_model(model)
    if not isinstance(verify, bool):
        raise InferenceError(f"init_inference: verify is {verify!r}; it takes True or False")
    if getattr(model, "hf_quantizer", None) is not None:
        raise InferenceError(
            "init_inference: transformers has quantised this model: load it unquantised, and use quantize="
        )
    if len({param.device for param in model.parameters()}) != 1:
        raise InferenceError("init_inference: the model's parameters are on several devices: move them to one")
    if isinstance(mp_size, bool) or not isinstance(mp_size, int) or mp_size < 1:
        raise InferenceError(f"init_inference: mp_size is {mp_size!r}; it takes the number of ranks")
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(model.config, what, None) or mp_size
        if heads % mp_size:
            raise InferenceError(
                f"init_inference: {what} of {type(model).__name__} is {heads}, which mp_size={mp_size} ranks cannot "
                "share evenly"
            )
    if dtype is not None and dtype not in DTYPES:
        raise InferenceError(
            f"init_inference: dtype is {dtype!r}; it takes {', '.join(map(str, DTYPES))}, and quantize="
        )
    if quantized is not None and quantized not in _BITS:
        raise InferenceError(f"init_inference: quantize is {quantized!r}; it takes 'int8', 'int4' or None")
    if quantized is not None and getattr(model, "quantization", None) is not None:
        raise InferenceError(f"init_inference: the model is quantised already: leave quantize={quantized!r} out")


def _positions(model: Any, max_tokens: int | None) -> int:
    most = getattr(model.config, "max_position_embeddings", None)  # T5 has relative ones, without an end
    if max_tokens is None:
        return 1024 if most is None else min(1024, most)
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise InferenceError(f"init_inference: max_tokens is {max_tokens!r}; it takes a number of tokens")
    if most is not None and max_tokens > most:
        raise InferenceError(f"init_inference: max_tokens is {max_tokens!r}; the model has {most} positions")
    return max_tokens


def _folder(checkpoint: str | os.PathLike[str] | None, model: Any, *, quantized: object) -> Path | None:
    if checkpoint is None:
        return None
    folder = Path(checkpoint)
    if getattr(model, "quantization", None) is not None:
        raise InferenceError(
            f"init_inference: checkpoint={str(folder)!r}, and the model is quantised already: give one that is not"
        )
    if not list(folder.glob("*.safetensors")) and engine_folder(folder) is None:
        raise InferenceError(
            f"init_inference: checkpoint={str(folder)!r} is no folder with .safetensors files, nor with a checkpoint "
            "of an engine"
        )
    if quantized is not None and (folder / DESCRIPTION).exists():
        raise InferenceError(f"init_inference: checkpoint={str(folder)!r} is quantised already: leave quantize= out")
    return folder

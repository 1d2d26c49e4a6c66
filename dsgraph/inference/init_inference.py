"""`init_inference`: a model of transformers becomes an engine with compiled graphs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from dsgraph.compiler.options import parse_options
from dsgraph.errors import InferenceError

from .checkpoints import engine_folder, load_weights
from .layouts import turn_weights
from .quantize import DESCRIPTION, load_quantized, quantize
from .ranks import all_ranks, slice_layers

if TYPE_CHECKING:
    from .engine import InferenceEngine

FAMILIES = ("llama", "qwen3", "gpt2", "opt", "mixtral")
"""Values of `config.model_type` of causal models that are tested token for token."""
ENCODERS = ("bert",)
"""Those of models that encode and generate nothing."""
ENCODER_DECODERS = ("t5",)
"""Those of models whose decoder generates from what an encoder reads."""
_BITS = {"int8": 8, "int4": 4}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def init_inference(
    model: nn.Module,
    *,
    mp_size: int = 1,
    dtype: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    quantize: Literal["int8", "int4"] | None = None,
    max_tokens: int | None = None,
    replace_with_kernel_inject: bool = True,
    options: dict[str, Any] | None = None,
    **others: Any,
) -> InferenceEngine:
    """Puts a model of transformers into an engine that generates with a static cache and compiled graphs, or encodes.

    The model goes to `eval()`; `dtype` and `quantize` change it in place.

    Args:
        model: Llama, Qwen3, GPT-2, OPT, Mixtral, T5 or BERT of transformers, unmodified; on the meta device, if there
            is a checkpoint.
        mp_size: Ranks that share each layer: all ranks of the run, which make the same calls of the engine.
        dtype: torch.float32, torch.bfloat16 or torch.float16. None: that of the model, or of the checkpoint.
        checkpoint: A folder of safetensors, transformers' own, sharded or not, or that of `save_quantized`; or of a
            training engine's checkpoints. Ranks that share layers read their slices alone.
        quantize: Weights of 8 or of 4 bits, see `dsgraph.quantize`, which takes more arguments.
        max_tokens: Positions of the key-value cache: prompt and generated tokens together; of T5 each of both; of BERT
            tokens of a sequence. Default: 1024, or as many as the model has positions, if these are fewer.
        replace_with_kernel_inject: Whether dsgraph's kernels stand in for what the model spells out in small ops.
        options: Of the backend, such as {"codegen": "eager"}, see `BackendOptions`.
        **others: DeepSpeed's names: `tensor_parallel={"tp_size": n}` for mp_size, `max_out_tokens` for max_tokens.

    Returns:
        The engine.

    Raises:
        InferenceError: The model, or an argument, cannot be taken; nothing was changed.
        OptionError: An option of the backend is wrong.
    """
    mp_size = _other_name(others, "tensor_parallel", "mp_size", mp_size, default=1)
    max_tokens = _other_name(others, "max_out_tokens", "max_tokens", max_tokens, default=None)
    _refuse_unknown(others)
    given = dict(options or {})
    if not replace_with_kernel_inject:
        if "kernels" in given:
            raise InferenceError(
                "init_inference: options has kernels, and replace_with_kernel_inject=False: leave one out"
            )
        given["kernels"] = "none"
    parse_options(given)
    _refuse(model, mp_size=mp_size, dtype=dtype, quantized=quantize)
    positions = _positions(model, max_tokens)
    folder = _folder(checkpoint, quantized=quantize)
    device = _device(model, folder)
    ranks = all_ranks(mp_size, device) if mp_size > 1 else None
    if folder is not None and ((folder / DESCRIPTION).exists() or ranks is None) and engine_folder(folder) is None:
        if ranks is not None:
            raise InferenceError(f"init_inference: checkpoint={str(folder)!r} is quantised: take mp_size=1")
        model, folder = _loaded(model, folder), None
    if dtype is not None:
        model = model.to(dtype)
    if quantize is not None and folder is None:
        _quantized(model, _BITS[quantize])
    if ranks is not None:
        slice_layers(model, ranks)
    if folder is not None:
        load_weights(model, folder, dtype=dtype, device=device, ranks=ranks)
        if quantize is not None:
            _quantized(model, _BITS[quantize])
    if device.type == "cpu" and ranks is None and given.get("kernels") != "none":
        turn_weights(model)
    return _engine_type(model)(model.eval(), max_tokens=positions, options=given, ranks=ranks)


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


def _other_name(others: dict[str, Any], name: str, own: str, value: Any, *, default: Any) -> Any:
    """What DeepSpeed's name of an argument says, or ours."""
    if name not in others:
        return value
    found = others.pop(name)
    if value != default:
        raise InferenceError(f"init_inference: {name} and {own} say the same: leave one out")
    if name != "tensor_parallel":
        return found
    if not isinstance(found, Mapping) or set(found) != {"tp_size"}:
        raise InferenceError(f'init_inference: tensor_parallel is {found!r}; it takes {{"tp_size": n}}')
    return found["tp_size"]


def _refuse_unknown(others: Mapping[str, Any]) -> None:
    for name in others:
        if name == "injection_policy":
            raise InferenceError(
                "init_inference: injection_policy has no effect: slices are found on the captured model; leave it out"
            )
        raise InferenceError(f"init_inference: there is no argument {name!r}")


def _device(model: nn.Module, folder: Path | None) -> torch.device:
    """Where the model computes; that of one on the meta device is the current one."""
    (device,) = {param.device for param in model.parameters()}
    if device.type != "meta":
        return device
    if folder is None:
        raise InferenceError("init_inference: the model is on the meta device, and there is no checkpoint to fill it")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _quantized(model: nn.Module, bits: int) -> None:
    quantize(model, bits=bits)


def _refuse(model: Any, *, mp_size: int, dtype: object, quantized: object) -> None:
    family = getattr(getattr(model, "config", None), "model_type", None)
    if not _is_taken(model, family):
        raise InferenceError(
            f"init_inference: {type(model).__name__} (model_type {family!r}) cannot be taken; it takes models of "
            f"transformers that generate, of the types {', '.join((*FAMILIES, *ENCODER_DECODERS))}, and encoders of "
            f"the types {', '.join(ENCODERS)}, which take input_ids (rows, length)"
        )
    if family not in FAMILIES and mp_size != 1:
        raise InferenceError(
            f"init_inference: mp_size is {mp_size!r}, and {type(model).__name__} (model_type {family!r}) is not "
            f"sliced: take mp_size=1; the types {', '.join(FAMILIES)} are"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise InferenceError(
            "init_inference: transformers has quantised this model: load it without, and use quantize="
        )
    kinds = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise InferenceError(
            f"init_inference: layers of type {sorted(kinds)[0]!r} need another cache: set them to full_attention"
        )
    if len({param.device for param in model.parameters()}) != 1:
        raise InferenceError("init_inference: the model's parameters are on several devices; it takes one")
    if isinstance(mp_size, bool) or not isinstance(mp_size, int) or mp_size < 1:
        raise InferenceError(f"init_inference: mp_size is {mp_size!r}; it takes the number of ranks")
    if mp_size > 1 and (quantized is not None or getattr(model, "quantization", None) is not None):
        raise InferenceError(
            f"init_inference: mp_size is {mp_size}, and weights of few bits are not sliced: take mp_size=1, or leave "
            "quantize out"
        )
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(model.config, what, None) or mp_size
        if heads % mp_size:
            raise InferenceError(
                f"init_inference: {what} of {type(model).__name__} is {heads}, which mp_size={mp_size} ranks cannot "
                "share evenly"
            )
    if dtype is not None and dtype not in _DTYPES:
        raise InferenceError(
            f"init_inference: dtype is {dtype!r}; it takes {', '.join(map(str, _DTYPES))}, and quantize="
        )
    if quantized is not None and quantized not in _BITS:
        raise InferenceError(f"init_inference: quantize is {quantized!r}; it takes 'int8', 'int4' or None")
    if quantized is not None and family in ENCODER_DECODERS:
        raise InferenceError(
            f"init_inference: quantize={quantized!r}, and {type(model).__name__} reads weights of its layers 'wo': "
            'give it dsgraph.quantize(model, bits=8, skip=["*.wo"])'
        )
    if quantized is not None and getattr(model, "quantization", None) is not None:
        raise InferenceError(f"init_inference: the model is quantised already: leave quantize={quantized!r} out")


def _is_taken(model: Any, family: object) -> bool:
    if family in ENCODERS:
        # Of several choices for each row, input_ids have three dimensions.
        return not (model.can_generate() or model.config.is_decoder or "MultipleChoice" in type(model).__name__)
    return family in (*FAMILIES, *ENCODER_DECODERS) and model.can_generate()


def _positions(model: Any, max_tokens: int | None) -> int:
    most = getattr(model.config, "max_position_embeddings", None)  # T5 has relative ones, without an end
    if max_tokens is None:
        return 1024 if most is None else min(1024, most)
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise InferenceError(f"init_inference: max_tokens is {max_tokens!r}; it takes a number of tokens")
    if most is not None and max_tokens > most:
        raise InferenceError(f"init_inference: max_tokens is {max_tokens!r}; the model has {most} positions")
    return max_tokens


def _folder(checkpoint: str | os.PathLike[str] | None, *, quantized: object) -> Path | None:
    if checkpoint is None:
        return None
    folder = Path(checkpoint)
    if not list(folder.glob("*.safetensors")) and engine_folder(folder) is None:
        raise InferenceError(
            f"init_inference: checkpoint={str(folder)!r} is no folder with .safetensors files, nor with a checkpoint "
            "of an engine"
        )
    if quantized is not None and (folder / DESCRIPTION).exists():
        raise InferenceError(f"init_inference: checkpoint={str(folder)!r} is quantised already: leave quantize= out")
    return folder


def _loaded(model: Any, folder: Path) -> Any:
    if (folder / DESCRIPTION).exists():
        return load_quantized(model, folder)
    return type(model).from_pretrained(folder, config=model.config)

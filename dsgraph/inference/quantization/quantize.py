"""`quantize`: the linear layers of a model get weights of few bits; and how such a model is written and read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from dsgraph.utils.errors import InferenceError

from .calibrated_rounding import inputs_in_order, round_weight
from .quantized_linear import QuantizedLinear

ModelT = TypeVar("ModelT", bound=nn.Module)
DESCRIPTION = "dsgraph_quantization.json"
WEIGHTS = "model.safetensors"
GROUP = 128
"""Neighbours that share a scale, of 4 bits, unless a user says otherwise."""


@dataclass(frozen=True)
class Quantization:
    """How a model was quantised, and what it cost.

    Attributes:
        bits: 8 or 4.
        group: Neighbours that share a scale, of 4 bits; 0 for 8 bits, which have one scale a row.
        errors: Name of a layer -> norm of its weight's change over the norm of its weight.
        bytes_before: Of these weights.
        bytes_after: Of these weights, with scales and minima.
        output_errors: With data, name of a layer -> norm of its outputs' change over the norm of its outputs. Layers
            that no batch reached are not in it: they are rounded to nearest.
        output_errors_to_nearest: The same if these weights had been rounded to nearest.
    """

    bits: Literal[8, 4]
    group: int
    errors: dict[str, float]
    bytes_before: int
    bytes_after: int
    output_errors: dict[str, float] = field(default_factory=dict)
    output_errors_to_nearest: dict[str, float] = field(default_factory=dict)


def quantize(
    model: ModelT,
    *,
    bits: int = 8,
    group: int | None = None,
    skip: Sequence[str] = (),
    data: Iterable[Any] | None = None,
) -> ModelT:
    """Replaces the linear layers of a model by such with weights of few bits, in place.

    It is for inference: such layers take no gradients. Embeddings, norms, and weights of what is no linear
    layer, such as Mixtral's experts, stay as they are; the report of an engine names the largest. Of a head that is
    tied to the embedding, the head gets a rounded copy.

    Weights are rounded to nearest; with `data`, so that the outputs of each layer change little, as GPTQ does it (arXiv
    2210.17323): one layer after the other, each for the inputs that layers rounded before it give. The model then runs
    on all batches as often as its layers have different inputs.

    Args:
        model: A module; its `nn.Linear` and transformers' `Conv1D` count.
        bits: 8, with one scale a row of a weight, or 4, with one scale and minimum a group.
        group: How many neighbours in a row share a scale, for 4 bits; an even number, by default 128.
        skip: Names of layers to leave, as in `named_modules`; `*` stands for anything.
        data: Batches: each a dict of the model's keywords, a tuple of its arguments, or its one argument.

    Returns:
        `model`, with a `quantization` that tells the error of each layer.

    Raises:
        InferenceError: An argument is wrong, nothing is left to quantise, or a layer cannot be divided in groups;
            nothing was changed.
    """
    if bits not in (8, 4):
        raise InferenceError(f"quantize: bits is {bits!r}; it takes 8 or 4")
    if bits == 8 and group is not None:
        raise InferenceError(f"quantize: group={group!r} is for bits=4; 8 bits have one scale a row: leave group out")
    if isinstance(getattr(model, "quantization", None), Quantization):
        raise InferenceError(f"quantize: {type(model).__name__} is quantised already")
    size = 0 if bits == 8 else GROUP if group is None else group
    found = linear_layers(model, skip)
    check_groups(found, bits=bits, group=size)
    how = Quantization(bits, size, dict.fromkeys(found, 0.0), 0, 0)  # type: ignore[arg-type]
    if data is not None:
        batches = _batches(data)
        with _evaluating(model):
            how = _calibrate(model, found, batches, how)
    for name, layer in found.items():
        if name not in how.output_errors:
            how = _put(model, name, QuantizedLinear(weight_of(layer), layer.bias, bits=how.bits, group=size), how)
    object.__setattr__(model, "quantization", how)
    return model


def _put(model: nn.Module, name: str, made: QuantizedLinear, how: Quantization) -> Quantization:
    """Puts a layer into the place of another one."""
    weight = weight_of(model.get_submodule(name))
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, made)
    return noted(how, name, made, weight)


def noted(how: Quantization, name: str, made: QuantizedLinear, weight: Tensor) -> Quantization:
    """`how`, with what a layer has cost whose weight (out_features, in_features) was rounded."""
    size = sum(t.numel() * t.element_size() for t in (made.packed, made.scale, made.least) if t is not None)
    return replace(
        how,
        errors={**how.errors, name: _relative_error(weight, made)},
        bytes_before=how.bytes_before + weight.numel() * weight.element_size(),
        bytes_after=how.bytes_after + size,
    )


def _calibrate(model: nn.Module, found: dict[str, Any], batches: list[Any], how: Quantization) -> Quantization:
    """Rounds the layers that the batches reach."""
    for names, products in inputs_in_order(model, found, batches):
        for name in names:
            layer = found[name]
            weight = weight_of(layer)
            best = round_weight(weight, products, bits=how.bits, group=how.group)
            rounded = (best.packed, best.scale, best.least)
            made = QuantizedLinear(weight, layer.bias, bits=how.bits, group=how.group, rounded=rounded)
            how = replace(
                _put(model, name, made, how),
                output_errors={**how.output_errors, name: best.error},
                output_errors_to_nearest={**how.output_errors_to_nearest, name: best.error_to_nearest},
            )
    return how


def _batches(data: Iterable[Any]) -> list[Any]:
    if isinstance(data, (Tensor, Mapping)):
        raise InferenceError(f"quantize: data is a {type(data).__name__}, one batch; it takes several: data=[batch]")
    batches = list(data)
    if not batches:
        raise InferenceError("quantize: data has no batch")
    return batches


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    trains = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trains:
            module.training = True


def save_quantized(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes a quantised model: safetensors, and how it was quantised.

    `init_inference(model, checkpoint=folder)` reads it into a model of the same configuration.

    Args:
        model: What `quantize` returned, or the module of an engine.
        folder: Is made if it is not there.

    Raises:
        InferenceError: The model is not quantised, or ranks share its layers.
    """
    how = getattr(model, "quantization", None)
    if not isinstance(how, Quantization):
        raise InferenceError(
            f"save_quantized: {type(model).__name__} is not quantised: call dsgraph.quantize(model) first"
        )
    if getattr(model, "tensor_plan", None) is not None:
        raise InferenceError(
            "save_quantized: ranks share the layers of this model, each has slices: save it before init_inference"
        )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_model(model, str(path / WEIGHTS))
    (path / DESCRIPTION).write_text(json.dumps(asdict(how), indent=1))


def read_description(model: nn.Module, folder: Path) -> Quantization:
    """How the model was quantised that `save_quantized` wrote into a folder.

    Raises:
        InferenceError: The folder is of another model.
    """
    how = Quantization(**json.loads((folder / DESCRIPTION).read_text()))
    missing = sorted(set(how.errors) - {name for name, _ in model.named_modules()})
    if missing:
        raise InferenceError(
            f"checkpoint={str(folder)!r} has a layer {missing[0]!r}, which {type(model).__name__} lacks"
        )
    return how


def linear_layers(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, Any]:
    """The layers that `quantize` replaces, by name; `skip` as there."""
    if isinstance(skip, str):
        raise InferenceError(f"quantize: skip is {skip!r}; it takes a list of names, such as [{skip!r}]")
    linear = {name: module for name, module in model.named_modules() if name and is_linear(module)}
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise InferenceError(
                f"quantize: skip names {pattern!r}, which is no linear layer of {type(model).__name__}"
            )
    found = {n: m for n, m in linear.items() if not any(fnmatchcase(n, pattern) for pattern in skip)}
    if not found:
        raise InferenceError(f"quantize: {type(model).__name__} has no linear layer to quantise")
    return found


def whole_weights(model: nn.Module) -> dict[str, int]:
    """The weights that are not of few bits, such as embeddings and Mixtral's experts: name -> bytes, largest first."""
    sizes = {
        name: param.numel() * param.element_size()
        for name, param in model.named_parameters()
        if param.ndim > 1 and param.is_floating_point()
    }
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what a layer of few bits computes."""
    # A class of nn.Linear's may compute otherwise. Conv1D of transformers is a linear layer of a transposed weight.
    return type(module) is nn.Linear or (
        type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    )


def weight_of(layer: Any) -> Tensor:
    """(out_features, in_features)."""
    return layer.weight.detach() if type(layer) is nn.Linear else layer.weight.detach().t()


def check_groups(found: Mapping[str, Any], *, bits: int, group: int) -> None:
    """Sees whether groups divide the rows of the layers' weights.

    Raises:
        InferenceError: They do not.
    """
    if bits == 8:
        return
    if group < 2 or group % 2:
        raise InferenceError(f"quantize: group is {group!r}; it takes an even number, such as 128")
    for name, layer in found.items():
        columns = weight_of(layer).shape[1]
        if columns % group:
            raise InferenceError(
                f"quantize: {name!r} has {columns} inputs, which groups of {group} do not divide: "
                f"take another group, or skip=[{name!r}]"
            )


def _relative_error(weight: Tensor, made: QuantizedLinear) -> float:
    change = torch.linalg.vector_norm(made.dequantized() - weight.float())
    return float(change / torch.linalg.vector_norm(weight.float()).clamp_min(1e-30))

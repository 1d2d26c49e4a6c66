"""`quantize`: quantization of a model's linear layers, and the files of such a model."""

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
"""Default number of neighbours that share a scale, for 4 bits."""


@dataclass(frozen=True)
class Quantization:
    """The quantization of a model, with its errors.

    Attributes:
        bits: 8 or 4.
        group: Number of neighbours that share a scale, for 4 bits; 0 for 8 bits, which have one scale a row.
        errors: Name of a layer -> norm of its weight's change over the norm of its weight.
        bytes_before: Bytes of these weights before.
        bytes_after: Bytes of these weights after, with scales and minima.
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
    """Replace the linear layers of a model by quantized ones, in place.

    It is for inference: quantized layers have no gradients. Embeddings, norms, and weights outside linear layers, such
    as Mixtral's experts, are not changed; the report of an engine names the largest. If the head is tied to the
    embedding, the head gets a rounded copy.

    Weights are rounded to nearest. With `data` they are rounded by GPTQ (arXiv 2210.17323), so that the outputs of each
    layer change little: one layer after the other, each for its inputs from the layers that are already rounded. The
    model then runs on all batches once for each different input of its layers.

    Args:
        model: A module; its `nn.Linear` and transformers' `Conv1D` layers are quantized.
        bits: 8, with one scale a row of a weight, or 4, with one scale and minimum a group.
        group: Number of neighbours in a row that share a scale, for 4 bits; even, by default 128.
        skip: Names of layers to leave unchanged, as in `named_modules`; `*` matches anything.
        data: Batches: each a dict of the model's keywords, a tuple of its arguments, or its one argument.

    Returns:
        `model`, with an attribute `quantization` that contains the error of each layer.

    Raises:
        InferenceError: An argument is wrong, nothing is left to quantize, or a layer cannot be divided into groups;
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
    """Replace a layer by a quantized one, and return `how` with its error."""
    weight = weight_of(model.get_submodule(name))
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, made)
    return noted(how, name, made, weight)


def noted(how: Quantization, name: str, made: QuantizedLinear, weight: Tensor) -> Quantization:
    """Return `how`, extended by the error of a layer whose weight (out_features, in_features) was rounded."""
    size = sum(t.numel() * t.element_size() for t in (made.packed, made.scale, made.least) if t is not None)
    return replace(
        how,
        errors={**how.errors, name: _relative_error(weight, made)},
        bytes_before=how.bytes_before + weight.numel() * weight.element_size(),
        bytes_after=how.bytes_after + size,
    )


def _calibrate(model: nn.Module, found: dict[str, Any], batches: list[Any], how: Quantization) -> Quantization:
    """Round the layers that the batches reach."""
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
        raise InferenceError("quantize: data is empty: give at least one batch")
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
    """Write a quantized model as safetensors, with a description of its quantization.

    `init_inference(model, checkpoint=folder)` reads it into a model of the same configuration.

    Args:
        model: The result of `quantize`, or the module of an engine.
        folder: A folder; it is created if it does not exist.

    Raises:
        InferenceError: The model is not quantized, or ranks share its layers.
    """
    how = getattr(model, "quantization", None)
    if not isinstance(how, Quantization):
        raise InferenceError(
            f"save_quantized: {type(model).__name__} is not quantised: call dsgraph.quantize(model) first"
        )
    if getattr(model, "tensor_plan", None) is not None:
        raise InferenceError(
            "save_quantized: the layers of this model are split over ranks: save it before init_inference"
        )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_model(model, str(path / WEIGHTS))
    (path / DESCRIPTION).write_text(json.dumps(asdict(how), indent=1))


def read_description(model: nn.Module, folder: Path) -> Quantization:
    """Return the quantization of the model that `save_quantized` wrote into a folder.

    Raises:
        InferenceError: The folder belongs to another model.
    """
    how = Quantization(**json.loads((folder / DESCRIPTION).read_text()))
    missing = sorted(set(how.errors) - {name for name, _ in model.named_modules()})
    if missing:
        raise InferenceError(
            f"checkpoint={str(folder)!r} has a layer {missing[0]!r}, which {type(model).__name__} lacks"
        )
    return how


def linear_layers(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, Any]:
    """Return the layers that `quantize` replaces, by name; see its argument `skip`."""
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
    """Return the weights that are not quantized, such as embeddings and Mixtral's experts.

    Name -> bytes, largest first.
    """
    sizes = {
        name: param.numel() * param.element_size()
        for name, param in model.named_parameters()
        if param.ndim > 1 and param.is_floating_point()
    }
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes what a quantized layer computes."""
    # A class of nn.Linear's may compute otherwise. Conv1D of transformers is a linear layer of a transposed weight.
    return type(module) is nn.Linear or (
        type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    )


def weight_of(layer: Any) -> Tensor:
    """Return the weight as (out_features, in_features)."""
    return layer.weight.detach() if type(layer) is nn.Linear else layer.weight.detach().t()


def check_groups(found: Mapping[str, Any], *, bits: int, group: int) -> None:
    """Check that groups divide the rows of the layers' weights.

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

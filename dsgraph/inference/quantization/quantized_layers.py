"""Quantized layers whose weights are read from a folder: as they were saved, or rounded while they are read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.inductor_ext import slice_of
from dsgraph.inference.weight_sources import WeightSource, find
from dsgraph.passes.parallel.slices import Slice

from .quantize import Quantization, noted, weight_of
from .quantized_linear import QuantizedLinear


def put_empty_layers(model: nn.Module, how: Quantization) -> None:
    """Replace the layers that `how.errors` names by quantized ones with buffers on the meta device."""
    for name in how.errors:
        layer: Any = model.get_submodule(name)
        weight = torch.empty_like(weight_of(layer), device="meta")
        bias = None if layer.bias is None else torch.empty_like(layer.bias, device="meta")
        parent, _, leaf = name.rpartition(".")
        made = QuantizedLinear(weight, bias, bits=how.bits, group=how.group)
        setattr(model.get_submodule(parent), leaf, made)


def with_empty_layers(model: nn.Module, how: Quantization) -> nn.Module:
    """Return a copy of a model, with the same parameters and buffers, after `put_empty_layers`."""
    twin = copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
    put_empty_layers(twin, how)
    return twin


@dataclass(frozen=True)
class _Weight:
    """A layer's weight as the model stored it; transposed it is (in_features, out_features)."""

    names: list[str]
    shape: tuple[int, ...]
    is_transposed: bool


class Rounding:
    """Rounding of layers' weights to nearest while they are read, so that only one unrounded weight is in memory.

    Attributes:
        how: Bits and group of the layers that its `errors` name; the error of each, once it was read.
    """

    def __init__(self, model: nn.Module, how: Quantization, names: Mapping[str, list[str]]) -> None:
        """Create the rounding; nothing is read yet.

        Args:
            model: The model, which still has these layers' weights, maybe on the meta device.
            how: The layers and their bits.
            names: First name of each weight of `model` -> all names that share it.
        """
        self.how = how
        every = {name: shared for shared in names.values() for name in shared}
        self._weights: dict[str, _Weight] = {}
        for layer in how.errors:
            module: Any = model.get_submodule(layer)
            names_of_layer = every[f"{layer}.weight"]
            self._weights[layer] = _Weight(names_of_layer, tuple(module.weight.shape), type(module) is not nn.Linear)
        self._last: tuple[str, QuantizedLinear] | None = None
        self._noted: set[str] = set()

    def source(
        self, base: WeightSource, *, dtype: torch.dtype | None, device: torch.device, prefix: str, folder: Path
    ) -> WeightSource:
        """Return a source that contains the quantized layers' buffers as well.

        Args:
            base: The source of their weights.
            dtype: The dtype to which weights are converted before they are rounded; None: unchanged.
            device: The device on which they are rounded.
            prefix: As for `find`.
            folder: For messages.

        Raises:
            InferenceError: A weight is missing or has another shape.
        """
        shapes, files = dict(base.shapes), dict(base.files)
        stored, layers = {}, {}
        for layer, weight in self._weights.items():
            stored[layer] = find(base, weight.names, shape=weight.shape, prefix=prefix, folder=folder)
            empty = torch.empty(weight.shape[::-1] if weight.is_transposed else weight.shape, device="meta")
            made = QuantizedLinear(empty, None, bits=self.how.bits, group=self.how.group)
            for key, buffer in made.named_buffers():
                shapes[f"{layer}.{key}"], layers[f"{layer}.{key}"] = tuple(buffer.shape), layer
                files[f"{layer}.{key}"] = base.files.get(stored[layer], "")

        def read(name: str, held: Slice | None, rank: int, count: int) -> Tensor:
            if name not in layers:
                return base.read(name, held, rank, count)
            layer = layers[name]
            if self._last is None or self._last[0] != layer:
                whole = base.read(stored[layer], None, 0, 1)
                self._round(layer, whole.to(device, dtype if dtype is not None else whole.dtype))
            assert self._last is not None
            value: Tensor = getattr(self._last[1], name.rpartition(".")[2])
            return value if held is None else slice_of(value, held.dim, parts=held.parts, ranks=count, rank=rank)

        return WeightSource(shapes, read, files)

    def _round(self, layer: str, weight: Tensor) -> None:
        oriented = weight.t() if self._weights[layer].is_transposed else weight
        made = QuantizedLinear(oriented, None, bits=self.how.bits, group=self.how.group)
        self._last = layer, made
        if layer not in self._noted:
            self._noted.add(layer)
            self.how = noted(self.how, layer, made, oriented)

"""The slices of a model's layers on each rank: found on the captured model, then taken."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from dsgraph.parallel.tensor.tensor_parallel import slice_parameters
from dsgraph.parallel.tensor.tensor_plan import plan_by_graph
from dsgraph.partitioning.rows import broadcast_from_first
from dsgraph.passes.parallel.find_slices import FoundSlices

from .quantization.quantize import Quantization, weight_of
from .quantization.quantized_linear import QuantizedLinear
from .quantization.sliced_linear import SlicedQuantizedLinear, check_slices
from .slicing_ranks import SlicingRanks

_EXAMPLE = 8  # tokens


def plan_layers(model: Any, ranks: SlicingRanks, few: Quantization | None) -> FoundSlices:
    """Return how the parameters of a model can be sliced.

    Args:
        model: A model of transformers.
        ranks: The ranks that will share its layers.
        few: The layers that are, or will be, quantized; None: none. Their weights are planned under the names
            "<layer>.weight", as (out_features, in_features).

    Raises:
        InferenceError: A quantized layer cannot be shared.
    """
    twin: Any = copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())}).eval()
    for name in few.errors if few is not None else ():
        parent, _, leaf = name.rpartition(".")
        setattr(twin.get_submodule(parent), leaf, _plain(twin.get_submodule(name), model))
    device = next(model.parameters()).device
    ids = torch.ones(1, _EXAMPLE, dtype=torch.long, device=device)
    example: dict[str, Any] = {"input_ids": ids}
    if model.can_generate():
        example["use_cache"] = False
    if model.config.is_encoder_decoder:
        example["decoder_input_ids"] = ids
    found = plan_by_graph(twin, example, ranks=ranks.count, given=None, unfuses=False)
    for name in few.errors if few is not None else ():
        held = found.slices.get(f"{name}.weight")
        if held is not None and few is not None:
            inputs = twin.get_submodule(name).in_features
            check_slices(name, held, inputs=inputs, group=few.group, ranks=ranks.count)
    return found


def _plain(layer: Any, model: nn.Module) -> nn.Linear:
    """Return a linear layer of the same sizes without memory of its own."""
    like = next(model.parameters())
    is_few = isinstance(layer, QuantizedLinear)
    shape = (layer.out_features, layer.in_features) if is_few else tuple(weight_of(layer).shape)
    made = nn.Linear(shape[1], shape[0], bias=layer.bias is not None, device="meta")
    for key, of in (("weight", shape), ("bias", shape[:1])):
        if getattr(made, key) is not None:
            value = torch.empty((), dtype=like.dtype, device=like.device).expand(of)
            setattr(made, key, nn.Parameter(value, requires_grad=False))
    return made


def slice_layers(model: nn.Module, ranks: SlicingRanks, found: FoundSlices) -> None:
    """Replace the layers by this rank's slices, in place, with the values of the first rank.

    Args:
        model: The model, with the planned quantized layers.
        ranks: The ranks that share it.
        found: The result of `plan_layers`.

    Raises:
        PartitionError: A part of the model is not supported; nothing was changed.
        RanksDisagreeError: Ranks hold different models; nothing was changed.
    """
    few = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    ranks.confirm("slice different layers of few bits", {name: repr(layer) for name, layer in few.items()})
    slice_parameters(model, ranks.mesh, found)
    for name, layer in few.items():
        for buffer in layer.buffers():
            if not buffer.is_meta:  # on the meta device it is filled when it gets memory
                broadcast_from_first(buffer, ranks.mesh)
        held = found.slices.get(f"{name}.weight")
        if held is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, SlicedQuantizedLinear(layer, held, ranks))

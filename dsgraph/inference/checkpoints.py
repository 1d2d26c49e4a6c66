"""Reads the weights of a model from a folder, one at a time; of ranks that share it each reads its slices."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsgraph.errors import InferenceError
from dsgraph.passes.parallel.slices import Slice

from .few_bits import Rounding
from .quantized_linear import QuantizedLinear
from .ranks import SlicingRanks
from .sliced_linear import SlicedQuantizedLinear, slices_of_buffers
from .sources import find, open_source


def load_weights(
    model: nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    ranks: SlicingRanks | None,
    rounding: Rounding | None = None,
) -> None:
    """Reads the weights of a model into it, one at a time; one on the meta device gets memory for what it holds.

    Args:
        model: Sliced already, if it is to be.
        folder: Of `*.safetensors`, or of a training engine's checkpoints.
        dtype: Of floating-point weights; None: as they were saved.
        device: Where they go.
        ranks: Those that share the model.
        rounding: Of the folder's weights, for layers of few bits that the model has already; None: the folder has
            their buffers.

    Raises:
        InferenceError: A weight is missing or has another shape; no weight was changed.
    """
    with ExitStack() as stack:
        source = open_source(folder, stack)
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        if rounding is not None:
            source = rounding.source(source, dtype=dtype, device=device, prefix=prefix, folder=folder)
        names, count = names_of_weights(model), 1 if ranks is None else ranks.count
        wanted, slices = dict(model.named_parameters()) | _buffers(model), _slices(model)
        found = {
            name: find(source, names[name], shape=_full(value, slices.get(name), count), prefix=prefix, folder=folder)
            for name, value in wanted.items()
        }
        kept = _float32(model)
        rank = 0 if ranks is None else ranks.mesh.get_local_rank()
        for name in sorted(wanted, key=lambda each: source.files.get(found[each], "")):
            own = source.read(found[name], slices.get(name), rank, count)
            converts = dtype is not None and own.is_floating_point() and name not in kept
            own = own.to(device, dtype if converts else own.dtype)
            _put(model, names[name], wanted[name], own)
    _fill_other_buffers(model, device)


def names_of_weights(model: nn.Module) -> dict[str, list[str]]:
    """First name of each weight -> all names that share it."""
    firsts: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, value in pairs:
        found.setdefault(firsts.setdefault(id(value), name), []).append(name)
    return found


def _slices(model: nn.Module) -> dict[str, Slice]:
    """How weights and buffers are sliced, by name."""
    plan = getattr(model, "tensor_plan", None)
    parameters = dict(model.named_parameters())  # a plan names weights and biases of layers of few bits as well
    found = {name: held for name, held in plan.slices.items() if name in parameters} if plan is not None else {}
    for name, layer in model.named_modules():
        if isinstance(layer, SlicedQuantizedLinear):
            found |= {f"{name}.{key}": one for key, one in slices_of_buffers(layer, layer.held).items()}
    return found


def _full(value: Tensor, held: Slice | None, count: int) -> tuple[int, ...]:
    """The shape of all ranks' slices."""
    if held is None or isinstance(value, DTensor):
        return tuple(value.shape)
    return tuple(size * count if dim == held.dim else size for dim, size in enumerate(value.shape))


def _float32(model: nn.Module) -> set[str]:
    """Scales and minima, with which weights were rounded."""
    layers = [name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)]
    return {f"{name}.{key}" for name in layers for key in ("scale", "least")}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _put(model: nn.Module, names: list[str], value: Tensor, own: Tensor) -> None:
    """Puts a weight in the place of another, wherever that is held."""
    made: Any = own
    if isinstance(value, DTensor):
        made = DTensor.from_local(
            own, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    is_parameter = isinstance(value, nn.Parameter)
    made = nn.Parameter(made, requires_grad=False) if is_parameter else made
    for name in names:
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        (module._parameters if is_parameter else module._buffers)[leaf] = made


def _fill_other_buffers(model: Any, device: torch.device) -> None:
    """Gives the buffers that no checkpoint holds, such as rotary frequencies, what the model gives them."""
    for name, module in model.named_modules():
        lost = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not lost:
            continue
        if any(param is not None for param in module._parameters.values()) or not hasattr(model, "_init_weights"):
            raise InferenceError(
                f"init_inference: buffer {lost[0]!r} of {name!r} is on the meta device, and nothing fills it: build "
                "the model on a device"
            )
        for key in lost:
            module._buffers[key] = torch.empty_like(module._buffers[key], device=device)
        with torch.no_grad():
            model._init_weights(module)

"""Reading of a model's weights from a folder, one at a time; each tensor-parallel rank reads only its slices."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsgraph.passes.parallel.slices import Slice
from dsgraph.utils.errors import InferenceError

from .quantization.quantized_linear import QuantizedLinear
from .quantization.sliced_linear import SlicedQuantizedLinear, slices_of_buffers
from .slicing_ranks import SlicingRanks
from .weight_sources import WeightSource, find, open_source


def load_weights(
    model: nn.Module,
    source: WeightSource,
    *,
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    ranks: SlicingRanks | None,
) -> None:
    """Read the weights of a model into it, one at a time; a model on the meta device gets memory.

    Args:
        model: The model, already tensor-parallel if it shall be.
        source: The source of the weights.
        folder: The folder of the source, for messages.
        dtype: Dtype of floating-point weights; None: as they were saved.
        device: The device of the weights.
        ranks: The ranks that share the model.

    Raises:
        InferenceError: As `find_weights`; no weight was changed.
    """
    found = find_weights(model, source, folder=folder, ranks=ranks)
    names, count = names_of_weights(model), 1 if ranks is None else ranks.count
    wanted, slices = _wanted(model), _slices(model)
    kept = _float32(model)
    rank = 0 if ranks is None else ranks.mesh.get_local_rank()
    for name in sorted(wanted, key=lambda each: source.files.get(found[each], "")):
        own = source.read(found[name], slices.get(name), rank, count)
        converts = dtype is not None and own.is_floating_point() and name not in kept
        own = own.to(device, dtype if converts else own.dtype)
        _put(model, names[name], wanted[name], own)
    _fill_other_buffers(model, device)


def from_transformers(model: Any, folder: Path) -> Any:
    """Return a new model with the weights of a folder, read by transformers, which also maps renamed weights.

    Args:
        model: A model of the wanted class and configuration; it is not changed.
        folder: A folder as `save_pretrained` writes it.

    Raises:
        InferenceError: A file is damaged or missing, or weights are missing or have other shapes.
    """
    with ExitStack() as stack:
        open_source(folder, stack)  # names the file that is damaged
    where = f"init_inference: checkpoint={str(folder)!r}"
    try:
        made, about = type(model).from_pretrained(
            folder, config=model.config, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise InferenceError(f"{where}: transformers cannot load it: {error}") from error
    for what in ("missing_keys", "mismatched_keys"):
        found = sorted(str(each[0] if isinstance(each, tuple) else each) for each in about[what])
        if found:
            says = "lacks" if what == "missing_keys" else "has other shapes of"
            raise InferenceError(
                f"{where} {says} {len(found)} weights of {type(model).__name__}, such as "
                f"{', '.join(map(repr, found[:3]))}: fetch all files, or give the model's own class and configuration"
            )
    return made


def find_weights(model: nn.Module, source: WeightSource, *, folder: Path, ranks: SlicingRanks | None) -> dict[str, str]:
    """Return first name of each weight -> its name in the source. The model is not changed.

    Args:
        model: The model, tensor-parallel or not yet.
        source: The source of the weights.
        folder: The folder of the source, for messages.
        ranks: The ranks that share a tensor-parallel model; None: it is not tensor-parallel.

    Raises:
        InferenceError: A weight is missing or has another shape, or nothing fills a buffer on the meta device.
    """
    names, count, prefix = names_of_weights(model), 1 if ranks is None else ranks.count, prefix_of(model)
    slices = _slices(model)
    _other_buffers(model)
    return {
        name: find(source, names[name], shape=_full(value, slices.get(name), count), prefix=prefix, folder=folder)
        for name, value in _wanted(model).items()
    }


def prefix_of(model: nn.Module) -> str:
    """Return the prefix of weight names of a model with a head, such as "transformer."; see `find`."""
    return f"{getattr(model, 'base_model_prefix', '')}."


def names_of_weights(model: nn.Module) -> dict[str, list[str]]:
    """Return first name of each weight -> all names that share it."""
    firsts: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, value in pairs:
        found.setdefault(firsts.setdefault(id(value), name), []).append(name)
    return found


def _slices(model: nn.Module) -> dict[str, Slice]:
    """Return the slices of weights and buffers, by name."""
    plan = getattr(model, "tensor_plan", None)
    parameters = dict(model.named_parameters())  # a plan names weights and biases of layers of few bits as well
    found = {name: held for name, held in plan.slices.items() if name in parameters} if plan is not None else {}
    for name, layer in model.named_modules():
        if isinstance(layer, SlicedQuantizedLinear):
            found |= {f"{name}.{key}": one for key, one in slices_of_buffers(layer, layer.held).items()}
    return found


def _full(value: Tensor, held: Slice | None, count: int) -> tuple[int, ...]:
    """Return the shape of all ranks' slices."""
    if held is None or isinstance(value, DTensor):
        return tuple(value.shape)
    return tuple(size * count if dim == held.dim else size for dim, size in enumerate(value.shape))


def _float32(model: nn.Module) -> set[str]:
    """Return the names of scales and minima of quantized weights, which stay float32."""
    layers = [name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)]
    return {f"{name}.{key}" for name in layers for key in ("scale", "least")}


def _wanted(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights, and the buffers that checkpoints contain, by first name."""
    saved = model.state_dict(keep_vars=True)
    return {
        **dict(model.named_parameters()),
        **{name: buffer for name, buffer in model.named_buffers() if name in saved},
    }


def _put(model: nn.Module, names: list[str], value: Tensor, own: Tensor) -> None:
    """Replace a weight by another, in all modules that hold it."""
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
    """Give the buffers that no checkpoint contains, such as rotary frequencies, the values that the model computes."""
    for module, lost in _other_buffers(model):
        for key in lost:
            module._buffers[key] = torch.empty_like(module._buffers[key], device=device)
        with torch.no_grad():
            model._init_weights(module)


def _other_buffers(model: nn.Module) -> list[tuple[Any, list[str]]]:
    """Return modules with buffers on the meta device that no checkpoint contains, and these buffers' names.

    Raises:
        InferenceError: The model has no way to fill them.
    """
    found: list[tuple[Any, list[str]]] = []
    for name, module in model.named_modules():
        kept = module._non_persistent_buffers_set
        lost = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta and key in kept]
        if not lost:
            continue
        if any(param is not None for param in module._parameters.values()) or not hasattr(model, "_init_weights"):
            raise InferenceError(
                f"init_inference: buffer {lost[0]!r} of {name!r} is on the meta device, and nothing fills it: build "
                "the model on a device"
            )
        found.append((module, lost))
    return found

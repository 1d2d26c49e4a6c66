"""The tensors of a model in a checkpoint: the same names and shapes for every layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsgraph.inductor_ext import resolve_group
from dsgraph.partitioning.rows import distributed_like, full_value, own_part, rows_like, split_dims
from dsgraph.partitioning.state import partition_states
from dsgraph.passes.ir.parameters import ParameterSlice
from dsgraph.utils.errors import CheckpointError

from .weight_files import describe


@dataclass(frozen=True)
class ModelTensors:
    """The parameters and buffers of a model on this rank, under the names that they have in the unmodified model.

    A checkpoint has each tensor in its full shape. Each rank writes and reads its rows of a `DTensor`. The slices of
    tensor-parallel ranks are gathered to be saved; a rank reads the full tensor and keeps its slice.

    Attributes:
        parameters: This rank's parameters, each once.
        values: What this rank saves: parameters, also under the names of tied ones, and buffers.
        sizes: Full shape of each tensor that any rank saves; equal on all ranks.
        description: Result of `describe`, for the whole model.
        put: Copies loaded values, by name, into those of this rank.
        layout: Number of ranks that share batches, operators and layers: `dp`, `tp` and `pp`; equal on all ranks.
        slices: The parameters of which tensor-parallel ranks hold a slice each.
        is_on_disk: True if parameters are on disk, also if this rank has no rows of them.
        unsaved: Names of values that differ between ranks, and that another rank saves. This rank only loads them.
    """

    parameters: Mapping[str, nn.Parameter]
    values: Mapping[str, Any]
    sizes: Mapping[str, torch.Size]
    description: Mapping[str, Any]
    put: Callable[[dict[str, Tensor]], object]
    layout: Mapping[str, int]
    slices: Mapping[str, ParameterSlice] = field(default_factory=dict)
    is_on_disk: bool = False
    unsaved: Collection[str] = ()

    @classmethod
    def of(cls, module: nn.Module) -> ModelTensors:
        """Return the tensors of a partitioned model, of which each rank has all names."""
        values, parts = module.state_dict(), partition_states(module)
        known = [entry for part in parts for entry in part.parameters]
        held = {id(entry.param): entry.spec.held for entry in known if entry.spec.held is not None}
        tp = next((part.tensor_mesh.size() for part in parts if part.tensor_mesh is not None), 1)
        return cls(
            parameters=dict(module.named_parameters()),
            values=values,
            sizes={name: value.shape for name, value in values.items() if isinstance(value, Tensor)},
            description=describe(module),
            put=module.load_state_dict,
            layout={"dp": dist.get_world_size() // tp, "tp": tp, "pp": 1},
            slices={name: held[id(param)] for name, param in module.named_parameters() if id(param) in held},
            is_on_disk=any(entry.tier == "disk" for entry in known),
        )

    @property
    def tied(self) -> Mapping[str, str]:
        """Names of parameters that are others under a second name, with the first name."""
        tied: Mapping[str, str] = self.description["tied"]
        return tied

    def full(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter, a buffer, or optimizer state as it is saved. Tensor-parallel ranks call it together."""
        held = self.slices.get(name)
        if held is None or value.shape != self.parameters[name].shape:
            return value
        if not isinstance(value, DTensor):
            return held.full(value.detach())
        full = full_value(value)  # in a pipeline the slice, gathered over data-parallel ranks
        return full if full.shape == self.sizes[name] else held.full(full)

    def empty(self, name: str, value: Tensor) -> Tensor:
        """Return memory into which a tensor is read; the full one of a slice, which the device may have no room for."""
        if name in self.slices:
            return torch.empty(self.sizes[name], dtype=value.dtype)
        return torch.empty_like(value)

    def refuse_slices_on_disk(self) -> None:
        """Refuse to read slices of parameters into files.

        Raises:
            CheckpointError: Parameters are on disk, and this rank has slices of some.
        """
        if self.is_on_disk and self.slices:
            raise CheckpointError(
                f"parameters are on disk, and this rank has a slice of {next(iter(self.slices))!r}, which cannot be "
                "read to disk yet: load it into a model without offload of parameters, or without tensor parallelism"
            )

    def check_state(self, name: str, key: str, value: Tensor) -> None:
        """Check that a checkpoint can store the optimizer's state of a parameter for every layout.

        A tensor of one element, such as a number of steps, is equal on all ranks, and so is the code of 8-bit state.

        Raises:
            CheckpointError: The parameter is split, and the state has another shape: each rank has its own, of which
                only one would be saved.
        """
        param = self.parameters[name]
        is_local = name in self.slices or (_is_split(param) and not isinstance(value, DTensor))
        if is_local and value.numel() != 1 and value.shape != param.shape and not key.startswith("qmap"):
            raise CheckpointError(
                f"optimizer state {key!r} of {name!r} has shape {list(value.shape)}, and the parameter, which is split "
                f"over ranks, {list(param.shape)}: use an optimizer whose state has the shape of its parameter"
            )

    def saved_key(self, name: str, key: str, own_keys: Collection[str]) -> str:
        """Return the key under which a checkpoint stores the optimizer's state of a parameter.

        Args:
            name: The parameter.
            key: The key of the optimizer.
            own_keys: See `OptimizerHooks`.
        """
        held = self.slices.get(name)
        if held is None or key not in own_keys:
            return key
        return f"{key}@{resolve_group(held.group).rank()}of{held.ranks}"

    def is_sliced(self, name: str, size: torch.Size) -> bool:
        """Return True if a saved tensor is the full one of a slice of this rank, or state of its shape."""
        return name in self.slices and size == self.sizes[name]

    def own(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor of which it has a slice. Only that part is moved to the device."""
        held, param = self.slices[name], self.parameters[name]
        piece = held.own(full, resolve_group(held.group).rank())
        return distributed_like(param, rows_like(param, piece).to(own_part(param).device))


def _is_split(param: Tensor) -> bool:
    if not isinstance(param, DTensor):
        return False
    return any(param.device_mesh.size(dim) > 1 for dim in split_dims(param))


@torch.no_grad()
def copy_into(values: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Copy loaded tensors, by name, into those of this rank; a `DTensor` takes its rows."""
    for name, value in values.items():
        own_part(value).copy_(own_part(found[name]))

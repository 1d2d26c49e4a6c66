"""Full tensors in and out of a partitioned model: plain checkpoints are loaded, and saved on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.rows import distributed_like, full_value, local_rows
from dsgraph.partitioning.state import held_by
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.mesh import mesh_ranks
from dsgraph.utils.errors import PartitionError

# Libraries that save on one rank do it on this one.
_WRITER = 0


def take_rows(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
    """Replace full tensors that are about to be loaded by this rank's rows: a `load_state_dict` pre-hook.

    Tensors of another shape are left to torch, which names them.

    Raises:
        PartitionError: A full tensor would be put in the place of a shard (`assign=True`), or the shard has no memory.
    """
    for attribute, param in module._parameters.items():
        name = prefix + attribute
        full = state_dict.get(name)
        if (scales := None if param is None else vars(param).get("quant_state")) is not None:
            stored = [key for key in scales.as_dict(packed=True) if f"{name}.{key}" in state_dict]
            loaded = {key: state_dict.pop(f"{name}.{key}") for key in stored}  # its layer would not know them
            vars(scales).update(vars(scales.from_dict(loaded, param.device)) if loaded else {})
        if not isinstance(param, DTensor) or not isinstance(full, Tensor) or isinstance(full, DTensor):
            continue
        if param.is_meta:
            raise PartitionError(
                f"load_state_dict: parameter {name!r} is on the meta device: call "
                'dsgraph.materialize(model, init="empty") first'
            )
        if (local_metadata or {}).get("assign_to_params_buffers"):
            del local_metadata["assign_to_params_buffers"]  # torch leaves it in the user's dict, for the next try
            raise PartitionError(
                f"load_state_dict(assign=True) would put the full tensor {name!r} in the place of a shard: leave "
                "assign=True out, then each rank copies its rows"
            )
        if param.dim() == 0 and full.shape == (1,):  # as very old checkpoints hold scalars; torch takes them so
            full = full[0]
        if full.shape == param.shape and (entry := _sliced_entry(module, attribute)) is not None:
            state_dict[name] = distributed_like(
                param, local_rows(full.detach(), entry.spec, held_by(module).partition.mesh)
            )
        elif full.shape == param.shape:
            state_dict[name] = distribute_tensor(full.detach(), param.device_mesh, param.placements, src_data_rank=None)


def _sliced_entry(module: Any, attribute: str) -> ParameterState | None:
    """Return a parameter of a partitioned model if it is tensor-parallel as well."""
    entry = held_by(module).parameters.get(attribute) if "_dsgraph" in module.__dict__ else None
    return entry if entry is not None and entry.spec.held is not None else None


def save_on_one_rank(model: nn.Module, save: Callable[[], Any]) -> Any:
    """Call `save` on rank 0 alone, while `model.state_dict()` gives full tensors there. All ranks call it together.

    Parameters are gathered one by one, and kept in the memory of that rank's host.

    Returns:
        What `save` returned; None on the other ranks.

    Raises:
        PartitionError: Rank 0 has no part in the model, or could not save it.
        RanksDisagreeError: Ranks hold different models, or some did not call it.
    """
    mesh = held_by(model).partition.parameter_mesh
    if _WRITER not in mesh_ranks(mesh):
        raise PartitionError(
            f"saving: rank {_WRITER} writes, and is not part of the model's mesh {mesh_ranks(mesh)}: gather it with "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict, and save that"
        )
    sharded = {n: value for n, value in model.state_dict(keep_vars=True).items() if isinstance(value, DTensor)}
    agreement = Agreement.over(mesh)
    agreement.confirm("save different models", [f"{n}: {list(value.shape)}" for n, value in sharded.items()])
    is_writer = dist.get_rank() == _WRITER
    full = full_tensors(sharded, keep=is_writer)
    result, failure = None, ""
    if is_writer:
        result, error = _with_full_tensors(model, full, save)
        failure = "" if error is None else f"{type(error).__name__}: {error}"
    said = agreement.exchange("whether the model is saved", failure)
    if is_writer and error is not None:
        raise error
    if said[_WRITER]:
        raise PartitionError(f"saving: rank {_WRITER} could not save the model: {said[_WRITER]}")
    return result


def full_tensors(values: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Return full tensors in the host's memory, tied ones once; none if they are not kept.

    All ranks call it together, with a result of `state_dict(keep_vars=True)`.
    """
    full: dict[str, Tensor] = {}
    first_names: dict[int, str] = {}
    with torch.no_grad():
        for name, value in values.items():
            first = first_names.setdefault(id(value), name)
            if first == name:
                gathered = full_value(value)
                if keep:
                    full[name] = gathered.cpu()
            elif keep:
                full[name] = full[first]
    return full


def _with_full_tensors(
    model: nn.Module, full: dict[str, Tensor], save: Callable[[], Any]
) -> tuple[Any, Exception | None]:
    def put_in(_: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        state_dict.update({prefix + name: tensor for name, tensor in full.items()})

    handle = model.register_state_dict_post_hook(put_in)
    try:
        return save(), None
    except Exception as error:  # the other ranks wait for the message in any case
        return None, error
    finally:
        handle.remove()

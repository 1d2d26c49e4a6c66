"""Shards that are pickled, as `torch.save(model.state_dict())` does: each file holds the rows of one rank.

If each rank saves into its own file, this is valid. On a single rank it would write a part of each parameter, and the
rest would be lost. So pickling is something that all ranks do at the same point, and a file is loaded by the rank that
wrote it. At stage 0 each rank has full tensors, which are pickled as plain ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dsgraph.compat.modules import save_own_state
from dsgraph.partitioning.rows import split_dims
from dsgraph.partitioning.state import PartitionState, held_by
from dsgraph.partitioning.transforms.quantized_weight import scales_of
from dsgraph.ranks.model_operations import FULL_TENSORS, ModelOperations
from dsgraph.utils.errors import PartitionError

_marks: weakref.WeakKeyDictionary[PartitionState, SavedRows] = weakref.WeakKeyDictionary()


class SavedRows:
    """A mark of the shards of one model, which is pickled with them, once per file."""

    def __init__(self, operations: ModelOperations) -> None:
        self._operations = operations

    def __reduce__(self) -> tuple[Any, ...]:
        self._operations.pickling()
        return rows_of_rank, (dist.get_rank(), dist.get_world_size())

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedRows:
        return self


def rows_of_rank(rank: int, world: int) -> None:
    """Refuse to load the rows of another rank. It is called when a file is unpickled.

    Raises:
        PartitionError: Rank or number of ranks differ from those of the saving process.
    """
    here = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if here == (rank, world):
        return
    found = "a process without a process group" if here is None else f"rank {here[0]} of {here[1]}"
    raise PartitionError(
        f"the file holds rank {rank}'s rows of a partitioned model, saved by torch.save on {world} ranks, and {found} "
        f"loads it: each rank loads its own file. {FULL_TENSORS}"
    )


torch.serialization.add_safe_globals([rows_of_rank])


def save_rows(
    original: type[nn.Module], module: nn.Module, state_dict: dict[str, Any], prefix: str, keep_vars: bool
) -> None:
    """Save a module's own parameters as class `original` does, and mark the shards among them."""
    # A layer with scales reads its weight. One of its plain class gets the shard, and nothing is gathered.
    saved = object.__new__(original) if scales_of(module) else module
    vars(saved).update(vars(module))
    with torch.inference_mode(False):  # a `DTensor` cannot be detached in inference mode
        save_own_state(original, saved, state_dict, prefix, keep_vars)
    partition = held_by(module).partition
    values = [state_dict.get(prefix + attribute) for attribute in module._parameters]
    mark_rows(values, partition)
    if partition.zero.number == 0 and not keep_vars:
        for value in values:
            if isinstance(value, DTensor) and not split_dims(value):
                _pickle_plain(value)


def mark_rows(values: Iterable[object], partition: PartitionState) -> None:
    """Mark the shards among some values: the parameters of a model or the state of its optimizer."""
    mark = _marks.setdefault(partition, SavedRows(partition.operations))
    for value in values:
        if isinstance(value, DTensor) and split_dims(value):
            value.dsgraph_rows = mark  # type: ignore[attr-defined]


def _pickle_plain(value: DTensor) -> None:
    """Let a full tensor be pickled as a plain one, which a process without ranks can load."""
    plain = value.to_local()
    value.__reduce_ex__ = plain.__reduce_ex__  # type: ignore[method-assign]

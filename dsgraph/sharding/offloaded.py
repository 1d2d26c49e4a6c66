"""Which parameters lie on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dsgraph.errors import PartitionError
from dsgraph.inductor_ext import chunk_rows, resolve_group
from dsgraph.tiers.slots import first_of
from dsgraph.tiers.stored_rows import ParameterFile

from .table import DiskShare, PartitionedModel, ShardedParameter


def read_offload(offload: Mapping[str, Any], stage: int | None) -> DiskShare:
    """What `partition(offload=...)` says.

    Raises:
        PartitionError: Something in it cannot be done.
    """
    given = dict(offload) if isinstance(offload, Mapping) else {"": str(offload)}
    folder, parameters, ratio = given.pop("folder", None), given.pop("parameters", None), given.pop("ratio", 1.0)
    if "optimizer" in given:
        raise PartitionError(
            "offload: partition makes no optimizer: leave 'optimizer' out, and wrap yours in "
            "dsgraph.offload.optimizer.OptimizerOnDisk, or use the engine"
        )
    shares = isinstance(ratio, (int, float)) and 0 < ratio <= 1
    if given or parameters != "disk" or not isinstance(folder, str) or not folder or not shares:
        takes = '{"parameters": "disk", "folder": a folder on that disk, "ratio": above 0 and up to 1}'
        raise PartitionError(f"offload is {offload!r}; it takes {takes}")
    if stage not in (None, 3):
        raise PartitionError(f"offload: stage {stage} holds gathered copies of all parameters; it takes stage 3")
    return DiskShare(folder, float(ratio))


def refuse_other_devices(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuses what is not on the CPU, or to be.

    Raises:
        PartitionError: Names the first one.
    """
    for name, param in parameters.items():
        if param.device.type not in ("cpu", "meta"):
            raise PartitionError(
                f"offload: parameter {name!r} is on {param.device.type}; parameters lie on disk for the CPU alone yet"
            )


def give_places(entries: Sequence[ShardedParameter], part: PartitionedModel) -> None:
    """Reserves places on the disk for the sharded ones among new parameters, where the model's lie there.

    Raises:
        OffloadError: The folder cannot be used, or the disk has too few bytes free.
    """
    offload = part.arguments.offload
    sharded = [entry for entry in entries if entry.layout.group] if offload.folder else []
    if not sharded:
        return
    Path(offload.folder).mkdir(parents=True, exist_ok=True)
    sizes = []
    for entry in sharded:
        rows, *rest = entry.layout.shape
        item = entry.owners[0][0]._parameters[entry.owners[0][1]]
        assert item is not None
        ranks = resolve_group(entry.layout.group).size()
        sizes.append(chunk_rows(rows, ranks) * math.prod(rest) * item.element_size())
    on_disk = first_of(sizes, offload.ratio)
    file = ParameterFile(sizes[:on_disk], below=Path(offload.folder))
    for number, entry in enumerate(sharded[:on_disk]):
        entry.stored = file.place(number)

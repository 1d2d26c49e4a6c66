"""Offload of parts of a model to the host or to disk."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from dsgraph.inductor_ext import chunk_rows, resolve_group
from dsgraph.offload.chunk_sizes import state_chunks
from dsgraph.offload.slots import first_of
from dsgraph.offload.stored_rows import ParameterFile, StoredRows
from dsgraph.partitioning.arguments import OffloadArguments
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import PartitionState
from dsgraph.passes import ParameterSpec
from dsgraph.passes.analysis.states import shard_bytes
from dsgraph.utils.errors import PartitionError
from dsgraph.utils.files import absolute

from .parameter_transform import ParameterTransform


class OffloadedRows(ParameterTransform):
    """Rows of a parameter in a file. Passes stream them in compiled graphs, eager code reads mapped memory.

    Attributes:
        stored: Where the rows are stored.
    """

    tier: ClassVar[str] = "disk"

    def __init__(self, stored: StoredRows) -> None:
        self.stored = stored

    @override
    def store(self, rows: Tensor) -> Tensor:
        return self.stored.fill(rows.contiguous())

    @override
    def attach(self, param: DTensor) -> None:
        self.stored.belongs_to(param)

    @override
    def before_eager_gather(self) -> None:
        self.stored.note_eager_read()


_TIERS = ("host", "disk")


def read_offload(offload: Mapping[str, Any], stage: int | None) -> OffloadArguments:
    """Check the argument `offload` of `partition`, and return it as a record.

    Raises:
        PartitionError: Something in it is not supported.
    """
    given = dict(offload) if isinstance(offload, Mapping) else {"": str(offload)}
    tiers = {what: given.pop(what, "") for what in ("parameters", "optimizer")}
    folder, ratio = given.pop("folder", None), given.pop("ratio", 1.0)
    shares = ratio if isinstance(ratio, Mapping) else dict.fromkeys(tiers, ratio)
    named = [tier for tier in tiers.values() if tier != ""]
    known = all(tier in _TIERS for tier in named) and (folder is None or (isinstance(folder, str) and folder))
    if given or not named or not known or not shares.keys() <= tiers.keys() or not all(map(_is_share, shares.values())):
        takes = (
            '{"optimizer": "host" or "disk", "parameters": "host" or "disk", "folder": a folder on that disk, "ratio": '
            "above 0 and up to 1}, of which one of the first two has to be there; the ratio may be one for each, "
            '{"optimizer": 0.5, "parameters": 1.0}'
        )
        raise PartitionError(f"offload is {offload!r}; it takes {takes}")
    if folder is not None and "disk" not in named:
        raise PartitionError(f"offload is {offload!r}: the folder has no effect, since nothing goes to disk")
    if tiers["parameters"] and stage not in (None, 3):
        raise PartitionError(
            f"offload: stage {stage} holds gathered copies of all parameters; 'parameters' takes stage 3, 'optimizer' "
            "any stage"
        )
    return OffloadArguments(
        **tiers,
        folder=absolute(folder or tempfile.gettempdir()) if "disk" in named else "",
        parameters_ratio=float(shares.get("parameters", 1.0)),
        optimizer_ratio=float(shares.get("optimizer", 1.0)),
    )


def _is_share(ratio: object) -> bool:
    return isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 < ratio <= 1


def refuse_other_devices(parameters: Mapping[str, nn.Parameter], offload: OffloadArguments) -> None:
    """Refuse parameters that are not on the CPU, or will not be, if they are offloaded or something goes to disk.

    Raises:
        PartitionError: Names the first one.
    """
    for name, param in parameters.items():
        refuse_device(f"parameter {name!r} is on {param.device.type}", param.device, offload)


def refuse_device(found: str, device: torch.device, offload: OffloadArguments) -> None:
    """Refuse a device for which this offload is not supported yet.

    Args:
        found: Description of the tensors, for the error.
        device: Their device.
        offload: The argument of `partition`.

    Raises:
        PartitionError: The offload is not supported for this device.
    """
    if device.type in ("cpu", "meta"):
        return
    if offload.parameters:
        raise PartitionError(
            f"offload: {found}; parameters can only be offloaded from the CPU yet: leave 'parameters' out of offload, "
            "and take more ranks at stage 3, or a lower param_dtype"
        )
    if offload.optimizer == "disk":
        raise PartitionError(
            f"offload: {found}; optimizer state on disk is only supported on the CPU yet: set 'optimizer' to 'host'"
        )


def nothing_moved(part: PartitionState) -> str:
    """Return a note about offload to the host that has no effect, because the model is on the CPU; or ""."""
    offload, on_cpu = part.arguments.offload, part.mesh.device_type == "cpu"
    named = [what for what in ("parameters", "optimizer") if on_cpu and getattr(offload, what) == "host"]
    if not named:
        return ""
    return f"offload: {' and '.join(named)} on the host: nothing is moved, the model is on the CPU"


def give_places(entries: Sequence[ParameterState], part: PartitionState) -> None:
    """Reserve places on disk for the sharded ones among new parameters, if the model's parameters are on disk.

    Raises:
        OffloadError: The folder cannot be used, or the disk has too few bytes free.
    """
    offload = part.arguments.offload
    sharded = [entry for entry in entries if entry.spec.group] if offload.parameters == "disk" else []
    if not sharded:
        return
    Path(offload.folder).mkdir(parents=True, exist_ok=True)
    sizes = []
    for entry in sharded:
        rows, *rest = entry.spec.shape
        item = entry.owners[0][0]._parameters[entry.owners[0][1]]
        assert item is not None
        ranks = resolve_group(entry.spec.group).size()
        sizes.append(chunk_rows(rows, ranks) * math.prod(rest) * item.element_size())
    on_disk = first_of(sizes, offload.parameters_ratio)
    file = ParameterFile(sizes[:on_disk], below=Path(offload.folder))
    for number, entry in enumerate(sharded[:on_disk]):
        entry.register(OffloadedRows(file.place(number)))


def trained_parameters(part: PartitionState) -> list[ParameterSpec]:
    """Return the parameters that are trained, in order."""
    return [entry.current_spec() for entry in part.parameters if entry.param.requires_grad]


def state_share(part: PartitionState) -> float:
    """Return the share of the optimizer's state that is offloaded: its ratio, rounded up to full pieces."""
    offload, trained = part.arguments.offload, trained_parameters(part)
    if offload.optimizer == "disk":
        chunks = state_chunks(trained, offload.optimizer_ratio)
        there, all_of_it = (sum(chunk.buffer for chunk in chunks), sum(chunk.state for chunk in chunks))
    else:
        sizes = [shard_bytes(item) for item in trained]
        there, all_of_it = sum(sizes[: first_of(sizes, offload.optimizer_ratio)]), sum(sizes)
    return there / all_of_it if all_of_it else 0.0

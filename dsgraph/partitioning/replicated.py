"""Checks that replicated parameters stay equal, also if a script itself writes to `model.parameters()`.

An optimizer makes the same step on all ranks. Another write may not: `nn.init.normal_(p)` and
`p.add_(torch.randn_like(p))` draw the numbers of each rank's own generator. The versions of the tensors show such a
write, and before the next step the ranks compare the written parameters. Before an optimizer's first step they compare
all, because writes to `.data` leave no trace.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh
from torch.optim import Optimizer

from dsgraph.ranks.mesh import axis_group
from dsgraph.utils.errors import RanksDisagreeError

from .parameter import ParameterState
from .state import PartitionState


def note_replicated(partition: PartitionState) -> None:
    """Note that the present values of replicated parameters are equal on all ranks."""
    for entry in partition.parameters:
        entry.note_version()


def confirm_replicated(partition: PartitionState, *, is_first: bool) -> None:
    """Compare the replicated parameters that were written to since. All ranks call it before the same step.

    Args:
        partition: The model.
        is_first: True for an optimizer's first step: then all are compared, as writes to `.data` leave no trace.

    Raises:
        RanksDisagreeError: The values differ between ranks; the error names the first such parameter.
    """
    replicated = [entry for entry in partition.parameters if entry.is_replicated]
    written = [entry for entry in replicated if is_first or entry.is_written]
    if not written:
        return
    with partition.operations.reducing(f"what was written to parameter {written[0].name!r}, of {len(written)}"):
        found = _differ(written, partition)
    for entry in written:
        entry.note_version()
    differing = [entry.name for entry, differs in zip(written, found, strict=True) if differs]
    if differing:
        raise RanksDisagreeError(
            f"parameter {differing[0]!r}, which is replicated, was written to since the last step, and ranks "
            "have different values now (each draws random numbers of its own): write to the attribute, as in "
            "torch.nn.init.normal_(model.layer.weight), which takes the first rank's values, or seed all ranks alike; "
            "nothing was updated"
        )


def warn_of_own_values(params: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Warn of values that differ between ranks with equal seeds, which `partition` is about to overwrite."""
    known = {name: param for name, param in params.items() if not param.is_meta}
    if not known or mesh.size() == 1:
        return
    sums = [_sum_of_bits(param) for param in known.values()]
    seed = sums[0].new_tensor(torch.initial_seed() % 2**62)
    extremes = torch.stack([torch.stack([*sums, seed]), -torch.stack([*sums, seed])])
    for dim in range(mesh.ndim):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, axis_group(mesh, dim))
    *differ, seeds_differ = (extremes[0] != -extremes[1]).tolist()
    different = [name for name, differs in zip(known, differ, strict=True) if differs]
    if different and not seeds_differ:
        warnings.warn(
            f"parameter {different[0]!r} ({len(different)} in all) has other values on other ranks, although they were "
            "seeded alike: partition gives all ranks those of the first. Pass ignored_params= if each rank is to keep "
            "its own",
            stacklevel=5,
        )


def holds_any(optimizer: Optimizer, partition: PartitionState) -> bool:
    """Return whether an optimizer holds parameters of a partitioned model."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return any(id(entry.param) in held for entry in partition.parameters)


def _differ(entries: Sequence[ParameterState], partition: PartitionState) -> list[bool]:
    """Return, for each parameter, whether another rank has different bits."""
    sums = torch.stack([_sum_of_bits(entry.rows) for entry in entries])
    extremes = torch.stack([sums, -sums])
    for dim in range(partition.mesh.ndim):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, axis_group(partition.mesh, dim))
    if partition.tensor_mesh is not None and not partition.operations.updates:
        # Later, tensor-parallel ranks may differ in the last bits: each has computed the same gradient.
        same = torch.tensor([entry.spec.held is None for entry in entries], device=extremes.device)
        across = torch.where(same, extremes, 0)
        dist.all_reduce(across, dist.ReduceOp.MAX, axis_group(partition.tensor_mesh, 0))
        extremes = torch.where(same, across, extremes)
    return [bool(differs) for differs in (extremes[0] != -extremes[1]).tolist()]


def _sum_of_bits(rows: Tensor) -> Tensor:
    data = rows.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    return words.sum() + data[8 * words.numel() :].sum(dtype=torch.int64)

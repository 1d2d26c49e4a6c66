"""ZeRO inside a pipeline's stages: shards between steps, full parameters while a schedule runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh

from dsgraph.partitioning.accumulation.accumulated_gradients import reduce_accumulated
from dsgraph.partitioning.accumulation.reduce_accumulated import IN_FLIGHT_BYTES
from dsgraph.partitioning.arguments import check_arguments
from dsgraph.partitioning.gathered_copies import gather_now
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.partition import partition
from dsgraph.partitioning.state import partition_states
from dsgraph.passes.parallel.stages.stage_graphs import put
from dsgraph.utils.errors import OptionError


@dataclass(frozen=True)
class Copies:
    """The data-parallel ranks, which hold the same stages.

    Attributes:
        mesh: Their mesh, of one dimension.
        stage: ZeRO stage of their parameters.
        keep_whole_below: See `partition`.
        param_dtype: Dtype in which stages compute; None: that of the shards.
        reduce_dtype: See `partition`.
        offload: See `partition`.
    """

    mesh: DeviceMesh
    stage: int
    keep_whole_below: int | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offload: Mapping[str, Any] | None = None


def copies_of(
    mesh: DeviceMesh | None,
    zero_stage: int,
    keep_whole_below: int | None,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    offload: Mapping[str, Any] | None = None,
) -> Copies | None:
    """Return the data-parallel ranks of `pipeline`, from its arguments; None without any.

    Raises:
        OptionError: An argument needs data-parallel ranks.
        PartitionError: An argument is wrong.
    """
    check_arguments(zero_stage, param_dtype, reduce_dtype, keep_whole_below)
    if mesh is not None:
        return Copies(mesh, zero_stage, keep_whole_below, param_dtype, reduce_dtype, offload)
    given = {"keep_whole_below": keep_whole_below, "param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    for name, value in {"zero_stage": zero_stage or None, **given}.items():
        if value is not None:
            raise OptionError(
                f"pipeline: {name} is {value}, and needs data_parallel=, the mesh of the ranks that hold the same "
                'stages. A mesh of one rank is enough: init_device_mesh("cpu", (ranks, 1), '
                'mesh_dim_names=("pp", "dp"))["dp"]'
            )
    return None


class ShardedStages:
    """This rank's parameters: shards over its data-parallel ranks, and the full ones that its stages use.

    A step gathers each parameter once and reduces each gradient once, whatever the number of micro-batches. Stages 1
    and 2 keep the full parameters between steps, stage 3 releases them.

    With a `param_dtype` the full parameters have that dtype. Gradients are accumulated in the dtype of the shards,
    because the sum of many micro-batches would lose digits in 16 bits.

    Transforms of a parameter change it when it is gathered, so once a step.

    Attributes:
        shards: A module with the parameters under their names in the model, partitioned.
        state: Its parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], copies: Copies) -> None:
        """Shard the parameters that this rank's stages use, given by name."""
        root = nn.Module()
        for name, param in parameters.items():
            put(root, name, nn.Parameter(param.detach(), requires_grad=param.requires_grad))
        is_cast = copies.param_dtype is not None
        self.shards = partition(
            root,
            copies.mesh,
            stage=copies.stage,
            keep_whole_below=copies.keep_whole_below,
            param_dtype=copies.param_dtype,
            reduce_dtype=copies.reduce_dtype,
            offload=copies.offload,
            cast_forward_inputs=False if is_cast else None,
        )
        (self.state,) = partition_states(self.shards)
        self._full = {entry: parameters[entry.name] for entry in self.state.parameters}
        self._entries = {id(full): entry for entry, full in self._full.items()}
        self._sums: dict[str, Tensor] | None = {} if is_cast else None
        for entry, full in self._full.items() if is_cast else ():
            full.data = torch.empty(0, dtype=entry.spec.dtypes(full.dtype)[0], device=full.device)
            if full.requires_grad:
                full.register_post_accumulate_grad_hook(self.add_gradient)
        self.let_go()

    def begin(self) -> None:
        """Gather the full parameters. All ranks of the mesh call it together."""
        self.state.refresh(eagerly=True)
        self.state.copies.finish()
        gathered = gather_now(tuple(self._full), self.state.operations)
        for entry, full in self._full.items():
            value = gathered.pop(entry).detach()
            for transform in entry.transforms:
                value = transform.after_gather(value)
            full.data = value.to(full.dtype)

    def add_gradient(self, full: Tensor) -> None:
        """Move the gradient of a full parameter, if any, to its accumulated gradient."""
        if self._sums is None or full.grad is None:
            return
        entry = self._entries[id(full)]
        grad, full.grad = full.grad.to(entry.param.dtype), None
        self._sums[entry.name] = self._sums[entry.name].add_(grad) if entry.name in self._sums else grad

    def take_gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of the full parameters by name, and remove them here."""
        found: dict[str, Tensor | None] = {}
        for entry, full in self._full.items():
            found[entry.name] = full.grad if self._sums is None else self._sums.pop(entry.name, None)
            full.grad = None
        return found

    def tensors(self) -> Iterator[Tensor]:
        """Yield the shards, and the gathered copies that exist now."""
        for entry in self._full:
            yield entry.rows
            if entry.gathered_copy is not None:
                yield entry.gathered_copy

    def transform_bytes(self) -> int:
        """Return the bytes that transforms of gathered parameters take at the beginning of a step."""
        return max(
            (
                transform.working_bytes(math.prod(entry.spec.shape))
                for entry in self._full
                for transform in entry.transforms
            ),
            default=0,
        )

    def accumulated_bytes(self) -> int:
        """Return the bytes of the full gradients that a step accumulates, with one that is being cast."""
        sizes = [size for _, size in self._trained()]
        return sum(sizes) + max(sizes, default=0) * (self._sums is not None)

    def reduction_bytes(self) -> int:
        """Return the bytes that the reduction of full gradients takes besides them, see `reduce_accumulated`."""
        trained = list(self._trained())
        replicated = sum(size for entry, size in trained if not entry.spec.group)
        split = [size for entry, size in trained if entry.spec.group]
        travelling = min(sum(split), IN_FLIGHT_BYTES + max(split, default=0))
        # Replicated parameters take four copies: concatenated gradients, their sum in two dtypes, and its parts.
        return 4 * replicated + 2 * travelling + sum(entry.rows.nbytes for entry, _ in trained if entry.spec.group)

    def _trained(self) -> Iterator[tuple[ParameterState, int]]:
        """Yield the trained parameters with the bytes of their accumulated gradients."""
        for entry, full in self._full.items():
            if full.requires_grad:
                yield entry, math.prod(entry.spec.shape) * entry.param.dtype.itemsize

    def finish(self, grads: Mapping[str, Tensor | None]) -> None:
        """Average gradients of full parameters over the ranks, and add them to the shards' `.grad`."""
        for entry in self._full:
            entry.accumulated_grad = grads[entry.name]
            entry.is_summed = entry.accumulated_grad is not None
        self.let_go()
        reduce_accumulated(self.state)

    def let_go(self) -> None:
        """Release the full parameters at stage 3, which has none between steps."""
        if not self.state.zero.gathers_each_use:
            return
        for entry, full in self._full.items():
            if entry.spec.group:
                full.data = torch.empty(0, dtype=full.dtype, device=full.device)

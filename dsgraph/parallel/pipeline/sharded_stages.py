"""ZeRO inside a pipeline's stages: shards between steps, full parameters while a schedule runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh

from dsgraph.partitioning.accumulation.accumulated_gradients import reduce_accumulated
from dsgraph.partitioning.partition import partition
from dsgraph.partitioning.state import partition_states
from dsgraph.passes.parallel.stage_graphs import put


@dataclass(frozen=True)
class Copies:
    """The data-parallel ranks, which hold the same stages.

    Attributes:
        mesh: Their mesh, of one dimension.
        stage: ZeRO stage of their parameters.
        keep_whole_below: See `partition`.
    """

    mesh: DeviceMesh
    stage: int
    keep_whole_below: int | None


class ShardedStages:
    """This rank's parameters: shards over its data-parallel ranks, and the full ones that its stages use.

    A step gathers each parameter once and reduces each gradient once, whatever the number of micro-batches. Stages 1
    and 2 keep the full parameters between steps, stage 3 releases them.

    Attributes:
        shards: A module with the parameters under their names in the model, partitioned.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], copies: Copies) -> None:
        """Shard the parameters that this rank's stages use, given by name."""
        root = nn.Module()
        for name, param in parameters.items():
            put(root, name, nn.Parameter(param.detach(), requires_grad=param.requires_grad))
        self.shards = partition(root, copies.mesh, stage=copies.stage, keep_whole_below=copies.keep_whole_below)
        (self._state,) = partition_states(self.shards)
        self._full = {entry: parameters[entry.name] for entry in self._state.parameters}
        self._lets_go()

    def begin(self) -> None:
        """Gather the full parameters. All ranks of the mesh call it together."""
        if self._state.zero.gathers_each_use:
            for entry in self._full:
                entry.is_held_for_step = bool(entry.spec.group)
            self._state.hold_copies()
        self._state.refresh(eagerly=True)
        self._state.copies.finish()
        for entry, full in self._full.items():
            full.data = entry.rows.detach() if entry.gathered_copy is None else entry.gathered_copy.detach()

    def finish(self) -> None:
        """Average the full parameters' gradients over the ranks, and add them to the shards' `.grad`."""
        for entry, full in self._full.items():
            entry.accumulated_grad, entry.is_summed, full.grad = full.grad, full.grad is not None, None
        self._lets_go()
        reduce_accumulated(self._state)

    def _lets_go(self) -> None:
        """Release the full parameters at stage 3, which has none between steps."""
        if not self._state.zero.gathers_each_use:
            return
        self._state.release_copies()
        for entry, full in self._full.items():
            if entry.spec.group:
                full.data = torch.empty(0, dtype=full.dtype, device=full.device)

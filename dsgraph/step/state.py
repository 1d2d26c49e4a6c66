"""What a partitioned model remembers besides its shards: gathered replicas, and when they went stale."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dsgraph import compat
from dsgraph.inductor_ext import c10d_functional, chunk_rows, resolve_group
from dsgraph.passes import MeshAxis
from dsgraph.sharding.seam import Layout, held_by
from dsgraph.sharding.stages import STAGES, ZeroStage

from .replicas import Freshness, new_replica, start_gathers


@dataclass(eq=False)
class ParameterState:
    """One parameter, shared by all modules that are tied to it.

    Attributes:
        name: Its (first) name in the model.
        owners: The modules that hold it, each with its name there.
        layout: How it is laid out.
        whole_because: Why every rank holds all of it; empty for a sharded parameter.
        replica: `[*shape]`, the gathered copy of stages 1 and 2, and while it is held for a step that of stage 3;
            None otherwise, and for whole parameters.
        is_held_for_step: Whether stage 3 holds a replica from the first micro-batch of a step to the last.
        freshness: What is known of the replica.
        leaf: What modules hand out while gradients are not reduced; see `local_gradients`.
        local_sum: `[*shape]` in the master dtype, the sum of the leaf's gradients, or zeros that wait for them.
        is_summed: Whether anything is in the sum that has not been reduced.
        withheld: What was in the sum, while a backward runs that must not add it.
        hooked_leaf: id of the leaf that reports its gradients.
        hooked_param: id of the parameter that does so.
    """

    name: str
    owners: list[tuple[nn.Module, str]]
    layout: Layout
    whole_because: str = ""
    replica: Tensor | None = None
    is_held_for_step: bool = False
    freshness: Freshness = Freshness.STALE
    leaf: Tensor | None = None
    local_sum: Tensor | None = None
    is_summed: bool = False
    withheld: Tensor | None = None
    hooked_leaf: int = 0
    hooked_param: int = 0
    _gathered_from: Any = None
    _gathered_version: int = -1

    @property
    def param(self) -> DTensor:
        """The sharded parameter as its module holds it now."""
        module, attribute = self.owners[0]
        param: DTensor = module._parameters[attribute]  # type: ignore[assignment]
        return param

    def bytes_of_rank(self, dtype: torch.dtype) -> int:
        """Bytes of one rank's rows of a sharded parameter in `dtype`, padded to those of the largest shard."""
        rows, *rest = self.layout.shape
        return chunk_rows(rows, resolve_group(self.layout.group).size()) * math.prod(rest) * dtype.itemsize

    @property
    def replica_bytes(self) -> int:
        """What a replica takes in memory: equally many rows of each rank, of which some may be padding."""
        dtype, _ = self.layout.dtypes(self.param.dtype)
        return self.bytes_of_rank(dtype) * resolve_group(self.layout.group).size()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has no part in the step.
        replica = None if self.layout.stage == 3 else self.replica
        nothing = {"leaf": None, "local_sum": None, "is_summed": False, "withheld": None}
        return {**self.__dict__, **nothing, "replica": replica, "hooked_leaf": 0, "hooked_param": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.replica is not None:  # of which the leaf is made
            self.replica.requires_grad_(False)

    def observe(self) -> Freshness:
        """How fresh the replica is with respect to the shard as it is now."""
        param = self.param
        if param is not self._gathered_from or param._version != self._gathered_version:
            self.freshness = Freshness.STALE
        return self.freshness

    def mark_gathered(self, freshness: Freshness) -> None:
        """Notes which state of the shard the replica was gathered from."""
        self._gathered_from = self.param
        self._gathered_version = self.param._version
        self.freshness = freshness


@dataclass(eq=False)
class PartitionState:
    """What `partition` leaves behind on a model.

    Attributes:
        mesh: The device mesh.
        axes: Its axes, as passes see them.
        stage: ZeRO stage.
        parameters: One entry a parameter, in the order of `named_parameters()`.
        accumulating: True inside `accumulate(model)`.
        gradients_stay_local: True while gradients are added up instead of reduced, see `local_gradients`.
        sums_were_read: Whether a compiled graph has been given sums that it may add to its gradients.
        under_way: Replicas that may not have arrived yet.
        step_room: Bytes that stage 3 may hold for a step of micro-batches; None while that is not known.
        reduces_once: Whether `accumulate` reduces gradients once a step, as it did last; at first as the stage does.
        awaiting_last_backward: True from the first gradient under `accumulate` to the backward that ends the step.
        reducing_in: The backward that reduces local gradients at its end, or was to and failed; -1 if there is none.
        watching: id of the state whose optimizer hook is registered; a deep copy must register its own.
        guarding: The same for the hook that refuses early steps.
    """

    mesh: DeviceMesh
    axes: tuple[MeshAxis, ...]
    stage: int
    parameters: list[ParameterState] = field(default_factory=list)
    under_way: list[Tensor] = field(default_factory=list)
    step_room: int | None = None
    accumulating: bool = False
    gradients_stay_local: bool = False
    sums_were_read: bool = False
    reduces_once: bool = field(init=False)
    awaiting_last_backward: bool = False
    reducing_in: int = -1
    watching: int = 0
    guarding: int = 0

    @property
    def zero(self) -> ZeroStage:
        """What the stage does."""
        return STAGES[self.stage]

    def __post_init__(self) -> None:
        self.reduces_once = self.stage < 2

    def replicated(self) -> list[ParameterState]:
        """The parameters of which a gathered replica is kept."""
        return [entry for entry in self.parameters if entry.replica is not None]

    def refresh(self) -> None:
        """Starts to gather every replica that may differ from its shards. All ranks call it at the same point.

        Whatever reads a replica afterwards waits for it: a graph by `AwaitReplicas`, eager code by `arrived`.
        """
        stale = [entry for entry in self.replicated() if entry.observe() is not Freshness.FRESH]
        if not stale:
            return
        self._watch_optimizers()
        self.finish()
        self.under_way = [entry.replica for entry in stale if entry.replica is not None]
        start_gathers(stale)
        in_step = self.accumulating or self.awaiting_last_backward
        for entry in stale:
            # With a gradient at hand, an optimizer may still write to the shard in a way that leaves no trace (through
            # `.data`): trust the replica only within an accumulated step, where nothing is updated.
            trusted = in_step or entry.param.grad is None
            entry.mark_gathered(Freshness.FRESH if trusted else Freshness.SUSPECT)

    def keep_replica(self, entry: ParameterState) -> None:
        """Stages 1 and 2: gives a parameter, if it is sharded, the gathered copy that is kept of it."""
        if entry.layout.group and self.stage in (1, 2):
            self._add_replica(entry)

    def _add_replica(self, entry: ParameterState) -> None:
        """Gives a sharded parameter a gathered copy, empty and stale."""
        entry.replica = new_replica(entry.layout, entry.param.to_local(), self)
        entry.freshness = Freshness.STALE
        for module, attribute in entry.owners:
            held_by(module).replicas[attribute] = entry.replica

    def hold_replicas(self) -> None:
        """Stage 3: makes replicas, still stale, of the parameters that are held for the step, unless it has some."""
        if self.replicated():
            return
        for entry in self.parameters:
            if entry.is_held_for_step:
                self._add_replica(entry)

    def _release_replicas(self) -> None:
        """Lets go of replicas that were held for a step. What autograd has saved of one lives as long as its graph."""
        self.finish()
        for entry in self.replicated():
            entry.replica = None
            for module, attribute in entry.owners:
                del held_by(module).replicas[attribute]

    def arrived(self, tensor: Tensor) -> Tensor:
        """A replica, when it has arrived; any other tensor at once."""
        if self.under_way:
            with torch.no_grad():
                c10d_functional.wait_tensor(tensor.detach())
        return tensor

    def finish(self) -> None:
        """Waits for all replicas that are still under way, be it that no graph has read them."""
        for replica in self.under_way:
            self.arrived(replica)
        self.under_way = []

    def __getstate__(self) -> dict[str, Any]:
        self.finish()  # a copy of a replica would never arrive
        step = ("accumulating", "gradients_stay_local", "sums_were_read", "awaiting_last_backward")
        return {**self.__dict__, **dict.fromkeys(step, False), "reducing_in": -1}

    def note_gradient(self) -> None:
        """A gradient went through the seam: unless the step goes on, expect an update of the shards.

        What stage 3 has held for the step is let go when the backward is through.
        """
        self.finish()  # what a backward reads must not be written to
        self.awaiting_last_backward = self.accumulating
        if self.accumulating:
            return
        for entry in self.replicated():
            entry.freshness = min(entry.freshness, Freshness.SUSPECT)
        if self.stage == 3 and self.replicated():
            compat.at_end_of_backward(self._release_replicas)

    def give_up_step(self) -> None:
        """The micro-batches of a step were in vain. What follows may be an update of the shards, or another step."""
        self.finish()
        self.awaiting_last_backward = False
        for entry in self.replicated():
            entry.freshness = min(entry.freshness, Freshness.SUSPECT)
        if self.stage == 3 and not self.accumulating:
            self._release_replicas()

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: the replicas of its parameters are stale. Fused steps leave no other trace."""
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for entry in self.replicated():
            if id(entry.param) in stepped:
                entry.freshness = Freshness.STALE
        if self.stage == 3 and any(entry.freshness is Freshness.STALE for entry in self.replicated()):
            self.awaiting_last_backward = False  # each micro-batch was inside `accumulate`
            self._release_replicas()

    def _watch_optimizers(self) -> None:
        if self.watching == id(self):
            return
        self.watching = id(self)
        state = weakref.ref(self)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            living = state()
            if living is not None:
                living.note_step(optimizer)

        handle = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, handle.remove)


@dataclass(eq=False)
class HeldParameters:
    """What one module of a partitioned model needs to hand out its parameters, by attribute name.

    Attributes:
        partition: What it is part of.
        replicas: Gathered copies: of stages 1 and 2, and of stage 3 while they are held for a step.
        leaves: What it hands out while gradients stay local, see `local_gradients`.
        sums: What has been added up of them, while the last micro-batch of a step runs.
        eager_reads: How often each parameter was handed out outside a compiled graph.
    """

    partition: PartitionState
    replicas: dict[str, Tensor] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    eager_reads: Counter[str] = field(default_factory=Counter)

    def __getstate__(self) -> dict[str, Any]:
        replicas = {} if self.partition.stage == 3 else self.replicas
        return {**self.__dict__, "replicas": replicas, "leaves": {}, "sums": {}}


def partition_states(model: nn.Module) -> list[PartitionState]:
    """The states of all partitioned modules inside `model`, in module order."""
    found: dict[int, PartitionState] = {}
    for module in model.modules():
        held = module.__dict__.get("_dsgraph")
        if held is not None:
            found.setdefault(id(held.partition), held.partition)
    return list(found.values())

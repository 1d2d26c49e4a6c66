"""The table of a partitioned model: one entry a parameter, and what its modules hand out."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.optim import Optimizer

from dsgraph.inductor_ext import chunk_rows, resolve_group
from dsgraph.offload.stored_rows import StoredRows
from dsgraph.passes import MeshAxis
from dsgraph.ranks.eager_agreement import eager_agreements, is_outside
from dsgraph.ranks.mesh import axis_group, mesh_ranks, shard_dim
from dsgraph.ranks.rank_notes import Intent
from dsgraph.utils.errors import PartitionError

from .layout import Layout
from .stages import STAGES, ZeroStage
from .transforms.compressed_reduction import CompressedInputs
from .transforms.fake_weight import FakeWeight


@dataclass(eq=False)
class ShardedParameter:
    """One parameter, shared by all modules that are tied to it.

    Attributes:
        name: Its (first) name in the model.
        owners: The modules that hold it, each with its name there.
        layout: How it is laid out.
        replicated_because: Why every rank holds all of it; empty for a sharded parameter.
        stored: Where this rank's rows lie that are not in memory.
    """

    name: str
    owners: list[tuple[nn.Module, str]]
    layout: Layout
    replicated_because: str = ""
    stored: StoredRows | None = None

    @property
    def param(self) -> DTensor:
        """The sharded parameter as its module holds it now."""
        module, attribute = self.owners[0]
        param: DTensor = module._parameters[attribute]  # type: ignore[assignment]
        return param

    @property
    def rows(self) -> Tensor:
        """This rank's rows of it, in the master dtype.

        Raises:
            PartitionError: Another parameter has been put in its place.
        """
        if not isinstance(self.param, DTensor):
            raise PartitionError(not_taken_in(self.name))
        return self.param.to_local().detach()

    def bytes_of_rank(self, dtype: torch.dtype) -> int:
        """Bytes of one rank's rows of a sharded parameter in `dtype`, padded to those of the largest shard."""
        rows, *rest = self.layout.shape
        return chunk_rows(rows, resolve_group(self.layout.group).size()) * math.prod(rest) * dtype.itemsize


KEEP_WHOLE_BELOW = 2**14
"""Elements below which a parameter stays replicated, if `partition` is not told otherwise."""


@dataclass(frozen=True)
class OffloadArguments:
    """What of a model lies elsewhere than on its device, as `partition(offload=...)` has it.

    Attributes:
        parameters: Where sharded parameters and their gradients lie: "disk", or "" for the device.
        optimizer: Where the optimizer's state lies: "host", "disk" or ""; `dsgraph.offload_optimizer` sees to it.
        folder: The folder on the disk.
        parameters_ratio: The share of the parameters' bytes. The last ones stay, which the backward reads first.
        optimizer_ratio: The share of the state's bytes; that of the last parameters stays.
    """

    parameters: str = ""
    optimizer: str = ""
    folder: str = ""
    parameters_ratio: float = 1.0
    optimizer_ratio: float = 1.0


@dataclass(frozen=True)
class PartitionArguments:
    """How the parameters of a model are partitioned: see `partition`, which is called with these."""

    stage: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    keep_whole_below: int
    regions: Literal["auto", "none"] | tuple[str, ...] = "none"
    offload: OffloadArguments = OffloadArguments()
    cast_forward_inputs: bool = True


@dataclass(eq=False)
class PartitionedModel:
    """What `partition` leaves behind on a model.

    Its methods are what a module asks when it hands out a parameter. Here nothing is kept from one use to the next;
    `dsgraph.step` keeps gathered copies and gradients, and answers otherwise.

    Attributes:
        mesh: The device mesh.
        axes: Its axes, as passes see them.
        arguments: How its parameters are partitioned.
        root: The module that was partitioned: the outermost one, where that was done again.
        parameters: One entry a parameter, in the order of `named_parameters()`; what was added later stands last.
        no_regions: Which equal blocks are not captured as regions, and why.
        accumulating: True inside `accumulate(model)`.
        gradients_stay_local: True while gradients are added up instead of reduced.
        updates: Number of steps that optimizers have made on its parameters.
        label: Suffix that distinguishes its parameters from those of other models, for messages: " of model 2".
    """

    mesh: DeviceMesh
    axes: tuple[MeshAxis, ...]
    arguments: PartitionArguments
    root: nn.Module
    parameters: list[ShardedParameter] = field(default_factory=list)
    no_regions: tuple[str, ...] = ()
    accumulating: bool = False
    gradients_stay_local: bool = False
    updates: int = 0
    label: str = ""

    @property
    def zero(self) -> ZeroStage:
        """What the stage does."""
        return STAGES[self.arguments.stage]

    def number_among_models(self) -> None:
        """Set the label, by the number of models that the same ranks have partitioned. All ranks call it together."""
        agreement = eager_agreements.over(self.mesh, self._ranks)
        agreement.models += 1
        self.label = f" of model {agreement.models}" if agreement.models > 1 else ""

    def take_in(self, entry: ShardedParameter) -> None:
        """Adds a parameter, whose modules hold its shard already."""
        self.parameters.append(entry)

    def tie(self, entry: ShardedParameter, module: nn.Module, attribute: str) -> None:
        """Hears that a module that was added holds a parameter of the table as well."""

    def forget(self, entry: ShardedParameter, module: nn.Module, attribute: str) -> None:
        """Takes out of the table that `module` holds a parameter, and the parameter if no other does."""
        entry.owners = [owner for owner in entry.owners if owner != (module, attribute)]
        if not entry.owners:
            self.parameters.remove(entry)
        held = held_by(module)
        for kept in (held.gathered_copies, held.leaves, held.sums, held.compressions, held.fake_weights):
            kept.pop(attribute, None)

    def refuse_amid_step(self, doing: str) -> None:
        """Refuses what would lose accumulated gradients.

        Raises:
            PartitionError: The model is inside `accumulate`, or its last backward is still to come.
        """
        if self.accumulating or self.gradients_stay_local:
            raise PartitionError(
                f"{doing} amid a step of micro-batches, whose gradients would be lost: first run the last micro-batch "
                "outside dsgraph.accumulate(model), or call dsgraph.discard(model) there"
            )

    def added_since(self) -> str | None:
        """The name of a trainable parameter that was added to the model after it was partitioned, if there is one."""
        known = {(id(module), attribute) for entry in self.parameters for module, attribute in entry.owners}
        for prefix, module in self.root.named_modules():
            for attribute, param in module._parameters.items():
                if param is not None and is_plain(param) and (id(module), attribute) not in known:
                    return f"{prefix}.{attribute}" if prefix else attribute
        return None

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted(mesh_ranks(self.mesh)))

    @cached_property
    def _ranks_of_rows(self) -> tuple[int, ...]:
        return tuple(sorted(dist.get_process_group_ranks(axis_group(self.mesh, shard_dim(self.mesh)))))

    def gathering(self, what: str, *, waits: bool = False, outside: bool | None = None) -> AbstractContextManager[None]:
        """Compare a gather outside compiled graphs with those of the other ranks.

        Args:
            what: Is gathered.
            waits: Whether it waits for all ranks even if it is what followed before. It always does outside a forward.
            outside: True outside a forward; None: detect it.

        Raises:
            RanksDisagreeError: They are about to do different things, or it failed.
        """
        outside = is_outside() if outside is None else outside
        agreement = eager_agreements.over(self.mesh, self._ranks_of_rows)
        intent = Intent(f"gathers {what}{self.label}", outside, step=self.updates)
        return agreement.on(intent, waits=waits or outside)

    def agree(self, does: str) -> None:
        """Check that all ranks do the same now, between a backward and a forward, and have done the same before.

        Raises:
            RanksDisagreeError: Ranks do, or have done, different operations.
        """
        agreement = eager_agreements.over(self.mesh, self._ranks)
        if agreement.patience:
            agreement.confirm(Intent(does + self.label, step=self.updates), between=True)

    def reducing(self, what: str) -> AbstractContextManager[None]:
        """The same around a reduction, which is over all ranks."""
        intent = Intent(f"reduces {what}{self.label}", step=self.updates)
        return eager_agreements.over(self.mesh, self._ranks).on(intent)

    def pickling(self) -> AbstractContextManager[None]:
        """Check the same before this rank pickles its rows, as `torch.save` of a state dict does."""
        intent = Intent(f"pickles its rows{self.label}", outside=True, step=self.updates)
        return eager_agreements.over(self.mesh, self._ranks_of_rows).on(intent, waits=True)

    def refresh(self, *, eagerly: bool = False, read: Tensor | None = None) -> None:
        """Starts to gather every gathered copy that may differ from its shards.

        Args:
            eagerly: Whether eager code needs them: then the ranks compare what they gather.
            read: Which gathered copy the eager code of a forward reads.
        """

    def arrived(self, tensor: Tensor) -> Tensor:
        """A gathered copy, when it has arrived; any other tensor at once."""
        return tensor

    def before_update(self, optimizer: Optimizer) -> None:
        """Hears that an optimizer of its parameters is about to step."""

    def watch_updates(self) -> None:
        """Watch the steps of optimizers from here on; some of them leave no other trace."""

    def note_gradient(self) -> None:
        """Hears that a gradient went through a parameter that was handed out."""

    def note_compressed(self, name: str) -> None:
        """Hears that the compressed gradient of a parameter is reduced outside a compiled graph."""

    def note_materialized(self, entry: ShardedParameter) -> None:
        """Hears that a parameter has got memory."""


@dataclass(eq=False)
class HeldParameters:
    """What one module of a partitioned model needs to hand out its parameters, by attribute name.

    Attributes:
        partition: What it is part of.
        gathered_copies: Gathered copies: of stages 1 and 2, and of stage 3 while they are held for a step.
        leaves: What it hands out while gradients stay local.
        sums: What has been added up of them, while the last micro-batch of a step runs.
        compressions: Momentum, errors and coefficients of those whose gradients are compressed.
        fake_weights: How those are rounded that a forward sees with few bits.
        equal_buffers: Names of its buffers that have taken the values of the mesh's first rank.
        eager_reads: How often each parameter was handed out outside a compiled graph.
    """

    partition: PartitionedModel
    gathered_copies: dict[str, Tensor] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    compressions: dict[str, CompressedInputs] = field(default_factory=dict)
    fake_weights: dict[str, FakeWeight] = field(default_factory=dict)
    eager_reads: Counter[str] = field(default_factory=Counter)
    equal_buffers: set[str] = field(default_factory=set)
    _names: dict[str, str] = field(default_factory=dict)

    def name_of(self, module: nn.Module, attribute: str) -> str:
        """The name in the model of what `module`, whose this is, calls `attribute`."""
        if attribute not in self._names:
            for entry in self.partition.parameters:
                self._names |= {own: entry.name for owner, own in entry.owners if owner is module}
        return self._names.get(attribute, attribute)

    def __getstate__(self) -> dict[str, object]:
        gathered_copies = {} if self.partition.zero.gathers_each_use else self.gathered_copies
        return {**self.__dict__, "gathered_copies": gathered_copies, "leaves": {}, "sums": {}, "compressions": {}}


def is_plain(param: Tensor) -> bool:
    """Whether a parameter is trained and not a shard."""
    return param.requires_grad and not isinstance(param, DTensor)


def not_taken_in(name: str) -> str:
    """What to say of such a parameter inside a partitioned model."""
    return (
        f"parameter {name!r} was put into the model after dsgraph.partition, and its gradient would not be averaged: "
        "call dsgraph.partition(model) again, which takes in what is new, then give it to the optimizer"
    )


def hold(module: nn.Module, part: PartitionedModel) -> HeldParameters:
    """`held_by` of a module of `part`, which gets it here if it has none."""
    if "_dsgraph" not in module.__dict__:
        object.__setattr__(module, "_dsgraph", HeldParameters(part))
    return held_by(module)


def held_by(module: nn.Module) -> HeldParameters:
    """What a module of a partitioned model needs to hand out its parameters."""
    held: HeldParameters = module._dsgraph  # type: ignore[assignment]
    return held


def partitioned_parts(model: nn.Module) -> list[PartitionedModel]:
    """All partitioned modules inside `model`, in module order."""
    found: dict[int, PartitionedModel] = {}
    for module in model.modules():
        held = module.__dict__.get("_dsgraph")
        if held is not None:
            found.setdefault(id(held.partition), held.partition)
    return list(found.values())

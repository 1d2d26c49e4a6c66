"""The table of a partitioned model: one entry a parameter, and what its modules hand out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor

from dsgraph.inductor_ext import chunk_rows, resolve_group
from dsgraph.passes import MeshAxis

from .layout import Layout
from .stages import STAGES, ZeroStage


@dataclass(eq=False)
class ShardedParameter:
    """One parameter, shared by all modules that are tied to it.

    Attributes:
        name: Its (first) name in the model.
        owners: The modules that hold it, each with its name there.
        layout: How it is laid out.
        whole_because: Why every rank holds all of it; empty for a sharded parameter.
    """

    name: str
    owners: list[tuple[nn.Module, str]]
    layout: Layout
    whole_because: str = ""

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


@dataclass(eq=False)
class PartitionedModel:
    """What `partition` leaves behind on a model.

    Its methods are what a module asks when it hands out a parameter. Here nothing is kept from one use to the next;
    `dsgraph.step` keeps gathered copies and gradients, and answers otherwise.

    Attributes:
        mesh: The device mesh.
        axes: Its axes, as passes see them.
        stage: ZeRO stage.
        parameters: One entry a parameter, in the order of `named_parameters()`.
        accumulating: True inside `accumulate(model)`.
        gradients_stay_local: True while gradients are added up instead of reduced.
    """

    mesh: DeviceMesh
    axes: tuple[MeshAxis, ...]
    stage: int
    parameters: list[ShardedParameter] = field(default_factory=list)
    accumulating: bool = False
    gradients_stay_local: bool = False

    @property
    def zero(self) -> ZeroStage:
        """What the stage does."""
        return STAGES[self.stage]

    def refresh(self) -> None:
        """Starts to gather every gathered copy that may differ from its shards."""

    def arrived(self, tensor: Tensor) -> Tensor:
        """A gathered copy, when it has arrived; any other tensor at once."""
        return tensor

    def note_gradient(self) -> None:
        """Hears that a gradient went through a parameter that was handed out."""

    def note_materialized(self, entry: ShardedParameter) -> None:
        """Hears that a parameter has got memory."""


@dataclass(eq=False)
class HeldParameters:
    """What one module of a partitioned model needs to hand out its parameters, by attribute name.

    Attributes:
        partition: What it is part of.
        replicas: Gathered copies: of stages 1 and 2, and of stage 3 while they are held for a step.
        leaves: What it hands out while gradients stay local.
        sums: What has been added up of them, while the last micro-batch of a step runs.
        eager_reads: How often each parameter was handed out outside a compiled graph.
    """

    partition: PartitionedModel
    replicas: dict[str, Tensor] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    eager_reads: Counter[str] = field(default_factory=Counter)

    def __getstate__(self) -> dict[str, object]:
        replicas = {} if self.partition.zero.gathers_each_use else self.replicas
        return {**self.__dict__, "replicas": replicas, "leaves": {}, "sums": {}}


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

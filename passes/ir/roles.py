"""Roles of the inputs of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class InputRole(Enum):
    """The role of an input of a captured graph. The backend sets it; it is never guessed from shapes or names."""

    SHARD = "shard"
    """This rank's rows of a parameter: all of them if it is replicated."""
    GATHERED_COPY = "gathered copy"
    """All rows of a sharded parameter, gathered before the graph runs."""
    ACCUMULATED_GRADIENT = "accumulated gradient"
    """The sum of a parameter's gradients on this rank, not reduced yet."""
    BUFFER = "buffer"
    """A buffer of a module."""
    OPTIMIZER_STATE = "optimizer state"
    """A state of the optimizer for a parameter, such as the momentum to which a graph adds its gradient."""
    DATA = "data"
    """Anything else: the batch, results of an earlier graph, sizes."""


@dataclass(frozen=True)
class GraphInput:
    """One input of a captured graph.

    Attributes:
        role: Its role.
        parameter: The `ParameterSpec.name` of the parameter that it belongs to; empty if it belongs to none.
        slice_group: The group of a tensor-parallel parameter; empty for others.
        model_name: The name of `parameter` in the partitioned model. In a graph that equal blocks may share, `*` stands
            for the number of the block: "layers.*.up.weight". Dumps and reports show it. It is not part of cache keys,
            so no pass may decide by it.
    """

    role: InputRole
    parameter: str = ""
    slice_group: str = ""
    model_name: str = field(default="", compare=False, repr=False)

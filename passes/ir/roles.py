"""What the inputs of a graph are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class InputRole(Enum):
    """What an input of a captured graph is. The backend tells it once; nobody guesses it from shapes or names."""

    SHARD = "shard"
    """This rank's rows of a parameter: all of them where every rank holds it replicated."""
    GATHERED_COPY = "gathered copy"
    """All rows of a split parameter, gathered before the graph runs."""
    ACCUMULATED_GRADIENT = "accumulated gradient"
    """What this rank has added up of a parameter's gradient, not reduced yet."""
    BUFFER = "buffer"
    """A buffer of a module."""
    OPTIMIZER_STATE = "optimizer state"
    """What an optimizer keeps of a parameter, such as the momentum into which a graph takes its gradient."""
    DATA = "data"
    """Anything else: the batch, what an earlier graph has returned, sizes."""


@dataclass(frozen=True)
class GraphInput:
    """One input of a captured graph.

    Attributes:
        role: What it is.
        parameter: The parameter that it belongs to, as `ParameterSpec.name` has it; empty where it belongs to none.
        slice_group: The tensor-parallel group of whose ranks each holds a slice of the parameter; empty where all hold
            the same.
    """

    role: InputRole
    parameter: str = ""
    slice_group: str = ""

"""The facts that a pass may use besides the graph: plain data, no process group, clock or device."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from torch.fx import GraphModule

from dsgraph.passes.analysis.analyses import Analyses
from dsgraph.passes.analysis.budget import MemoryBudget
from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.parameters import GraphInput, MeshAxis, ParameterSpec


class Phase(Enum):
    """The phase in which a pass runs. Phases follow each other in this order."""

    CAPTURE = "capture"
    """The graph that Dynamo captured: torch functions, forward only."""
    JOINT = "joint"
    """ATen ops, forward and backward in one graph; the whole graph when nothing needs a gradient."""
    PAIR = "pair"
    """The forward and the backward after partitioning, both at once, with the values that cross between them."""
    FORWARD = "forward"
    """The forward after partitioning; the whole graph when nothing needs a gradient."""
    BACKWARD = "backward"
    """The backward after partitioning."""

    def __lt__(self, other: Phase) -> bool:
        order = list(Phase)
        return order.index(self) < order.index(other)


@dataclass(frozen=True)
class PassContext:
    """The facts a pass may use besides the graph. Plain data, the same on every rank up to shard sizes.

    Attributes:
        phase: The phase of the graph at hand.
        axes: The mesh axes whose groups the graph may name.
        params: Placeholder name -> parameter, for the parameters that `partition` manages.
        roles: Placeholder name -> its role, for every input of the captured graph.
        gradients: Output number -> name of the parameter whose gradient it is, in joint and backward graphs.
        inference: True when no backward follows; for a captured graph, when it starts with gradients switched off.
        user_outputs: Number of a forward graph's outputs that are the model's; they come first, and the others are
            saved for the backward. None if nothing is saved, or if it is unknown.
        costs: The cost model of the first rank's host, the same on every rank.
        budget: The memory that a step may use, with reservations; one for all phases of a compile, so that a pass
            cannot use what an earlier one has reserved.
        gathered_copies: Placeholders of gathered copies that may still be gathering when the graph begins.
        fuses: True if the code generator fuses pointwise ops and reductions, as Inductor does.
        part: The graph of a pair: "forward" or "backward"; empty for the pair, and in other phases.
        analyses: Analyses of graphs, each computed once for each version of a graph. It adds no facts: its results
            follow from the graph.
    """

    phase: Phase
    axes: tuple[MeshAxis, ...] = ()
    params: Mapping[str, ParameterSpec] = field(default_factory=lambda: MappingProxyType({}))
    roles: Mapping[str, GraphInput] = field(default_factory=lambda: MappingProxyType({}), kw_only=True)
    gradients: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    inference: bool = False
    user_outputs: int | None = None
    costs: CostModel = field(default_factory=CostModel.default)
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    gathered_copies: frozenset[str] = frozenset()
    fuses: bool = False
    part: str = ""
    analyses: Analyses = field(default_factory=Analyses, compare=False, repr=False)

    @property
    def graph(self) -> str:
        """Name of the graph in messages and dumps: its phase, and the graph of a pair."""
        return f"{self.phase.value}-{self.part}" if self.part else self.phase.value

    @property
    def memory_limit(self) -> int | None:
        """Bytes of the device's memory that a step may use; None if unknown."""
        return self.budget.limit

    def memory_left(self, gm: GraphModule) -> int:
        """Return the bytes that the limit leaves beside a graph's needs and permanent tensors."""
        if self.budget.limit is None:
            return sys.maxsize
        return self.budget.left_beside(self.analyses.memory(gm), self.params.values())

    def axis(self, group: str) -> MeshAxis:
        """Return the axis of a process group that a node names.

        Raises:
            PassError: The group is not one of the mesh's.
        """
        for axis in self.axes:
            if axis.group == group:
                return axis
        known = ", ".join(f"{axis.name}={axis.group!r}" for axis in self.axes) or "none"
        raise PassError(f"the graph names process group {group!r}, which is not in the mesh (known: {known})")

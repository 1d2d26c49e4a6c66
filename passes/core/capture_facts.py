"""The facts of a captured graph, from which passes get their context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch.fx import GraphModule

from dsgraph.passes.analysis.budget import MemoryBudget, MemoryPart, StageNeeds, parameter_needs
from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.compat import captured_gradients, captured_input
from dsgraph.passes.ir.graph import placeholders
from dsgraph.passes.ir.parameters import GraphInput, MeshAxis, ParameterSpec

from .context import PassContext, Phase
from .graph_pair import GraphPair


@dataclass(frozen=True)
class CaptureFacts:
    """The facts that the backend knows of a captured graph.

    Attributes:
        axes: The mesh axes of its parameters.
        params: Input number of the captured graph -> parameter.
        roles: Input number of the captured graph -> its role.
        block_params: Input number of the captured graph -> parameter, for full parameters of a unit: the graph of the
            step gathers them before the graph runs, and reduces their gradients afterwards.
        costs: The cost model; None for the defaults of the device.
        memory_limit: See `MemoryBudget.limit`.
        keep_bytes: See `MemoryBudget.to_keep`.
        device_type: Device type of the parameters: "cpu", "cuda", ...
        gathered_copies: Input numbers of gathered copies that may still be gathering when the graph begins.
        fuses: See `PassContext`.
        keeps_limit: True if a step must stay under `memory_limit`, at any cost.
        offload_tier: The tier to which activations may be offloaded for that; None for none.
        unread: Parameters of the model that the graph does not read, which a step still keeps in memory.
        unread_copies: Bytes of their gathered copies.
        held_gradients: Bytes of gradients of earlier micro-batches that exist during a backward.
        is_step: True for the graph of a step, whose nodes are runs of units.
        is_sliced: True if the graph communicates slices of tensors.
        stage: What a step needs besides the graph of a pipeline stage that keeps a limit; None for other graphs.
    """

    axes: tuple[MeshAxis, ...] = ()
    params: Mapping[int, ParameterSpec] = field(default_factory=lambda: MappingProxyType({}))
    roles: Mapping[int, GraphInput] = field(default_factory=lambda: MappingProxyType({}), kw_only=True)
    block_params: Mapping[int, ParameterSpec] = field(default_factory=lambda: MappingProxyType({}), kw_only=True)
    costs: CostModel | None = None
    memory_limit: int | None = None
    keep_bytes: int | None = None
    device_type: str = "cpu"
    gathered_copies: frozenset[int] = frozenset()
    fuses: bool = False
    keeps_limit: bool = False
    offload_tier: str | None = None
    unread: tuple[ParameterSpec, ...] = ()
    unread_copies: int = 0
    held_gradients: int = 0
    is_step: bool = False
    is_sliced: bool = False
    stage: StageNeeds | None = None

    @property
    def is_partitioned(self) -> bool:
        """True if the graph reads parameters of a partitioned model."""
        return bool(self.params or self.gathered_copies)

    def budget(self) -> MemoryBudget:
        """Return the memory that a step needs for parameters, and the limit; nothing is reserved yet."""
        needs = parameter_needs([*self.params.values(), *self.unread])
        needs[MemoryPart.PARAMETERS] += self.unread_copies + sum(self.stage.held.values() if self.stage else ())
        needs[MemoryPart.GRADIENTS] += self.held_gradients
        return MemoryBudget(self.memory_limit, needs, to_keep=self.keep_bytes)

    def context(
        self,
        gm: GraphModule,
        phase: Phase,
        *,
        inference: bool = False,
        user_outputs: int | None = None,
        budget: MemoryBudget | None = None,
    ) -> PassContext:
        """Return the facts as passes over `gm` see them: parameters by the names of its placeholders.

        Args:
            gm: The graph.
            phase: The phase of the passes.
            inference: See `PassContext`.
            user_outputs: See `PassContext`.
            budget: The budget of earlier phases of the same compile, with their reservations; None for a new one.
        """
        params, gathered_copies, roles = {}, set[str](), {}
        for number, node in enumerate(placeholders(gm)):
            origin = number if phase is Phase.CAPTURE else captured_input(node)
            if origin in self.gathered_copies:
                gathered_copies.add(node.name)
            is_tensor = phase is Phase.CAPTURE or isinstance(node.meta.get("val"), torch.Tensor)
            if origin is not None and origin in self.params and is_tensor:  # a DTensor's mesh is a placeholder, too
                params[node.name] = self.params[origin]
            if origin is not None and origin in self.roles and is_tensor:
                roles[node.name] = self.roles[origin]
        (output,) = gm.graph.find_nodes(op="output")
        origins = captured_gradients(output) if phase in (Phase.JOINT, Phase.BACKWARD) else {}
        gradients = {number: self.params[origin].name for number, origin in origins.items() if origin in self.params}
        return PassContext(
            phase=phase,
            axes=self.axes,
            params=MappingProxyType(params),
            roles=MappingProxyType(roles),
            gathered_copies=frozenset(gathered_copies),
            fuses=self.fuses,
            gradients=MappingProxyType(gradients),
            inference=inference,
            user_outputs=user_outputs,
            costs=self.costs or CostModel.default(self.axes, device_type=self.device_type),
            budget=budget or self.budget(),
        )

    def pair_context(self, pair: GraphPair, *, budget: MemoryBudget) -> PassContext:
        """Return the facts as passes over both graphs see them, by the names of placeholders of either."""
        ahead = self.context(pair.forward, Phase.FORWARD, user_outputs=pair.user_outputs, budget=budget)
        behind = self.context(pair.backward, Phase.BACKWARD, budget=budget)
        return replace(
            ahead,
            phase=Phase.PAIR,
            params=MappingProxyType({**ahead.params, **behind.params}),
            roles=MappingProxyType({**ahead.roles, **behind.roles}),
            gathered_copies=ahead.gathered_copies | behind.gathered_copies,
            gradients=behind.gradients,
        )

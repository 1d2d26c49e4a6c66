"""A partitioned model: its parameters, its gathered copies, and where its step stands."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.optim import Optimizer

from dsgraph.compat.dynamo import keep_static
from dsgraph.passes import AxisRole, MeshAxis, ParameterSpec
from dsgraph.ranks.crossed_mesh import crossed_mesh
from dsgraph.ranks.mesh import axis_group
from dsgraph.ranks.model_operations import ModelOperations
from dsgraph.utils.errors import PartitionError

from .arguments import PartitionArguments
from .gathered_copies import GatheredCopies, new_copy
from .parameter import Freshness, ParameterState
from .rows import placements_for
from .stages import STAGES, CopyLifetime, ZeroStage
from .step.step_plan import StepPlan
from .step.step_run import StepRun


class StepPhase(Enum):
    """The phase of a model between two optimizer steps; `FOLLOWING` says which may come next."""

    IDLE = "idle"
    """Outside `accumulate`, nothing added up: each backward reduces its gradients."""
    REDUCING_EACH = "reducing each"
    """Inside `accumulate`, and each backward reduces its gradients."""
    ADDING = "adding"
    """Inside `accumulate`: gradients are added up on this rank."""
    LAST = "last"
    """Outside, after `ADDING`: the next backward ends the step."""
    ENDING = "ending"
    """That backward runs, and reduces at its end what its graphs have not; or it has failed, and another one will."""


FOLLOWING: Mapping[StepPhase, tuple[StepPhase, ...]] = MappingProxyType(
    {
        StepPhase.IDLE: (StepPhase.REDUCING_EACH, StepPhase.ADDING),
        StepPhase.REDUCING_EACH: (StepPhase.IDLE, StepPhase.ADDING),
        StepPhase.ADDING: (StepPhase.LAST, StepPhase.IDLE),
        StepPhase.LAST: (StepPhase.ENDING, StepPhase.ADDING, StepPhase.IDLE),
        StepPhase.ENDING: (StepPhase.IDLE, StepPhase.ADDING),
    }
)


@dataclass(eq=False)
class PartitionState:
    """A partitioned model, with what outlives a graph between two optimizer steps.

    Attributes:
        mesh: The ranks over which rows are sharded and gradients averaged.
        tensor_mesh: The ranks that share the parameters of a tensor-parallel model; None for any other model.
        parameter_mesh: The mesh of its `DTensor`s: both.
        axes: Its axes, as passes see them.
        arguments: How its parameters are partitioned.
        root: The module that was partitioned: the outermost one, where that was done again.
        guard: Registers the checks of a model for its lifetime; a deep copy must register its own.
        parameters: One entry a parameter, in the order of `named_parameters()`; what was added later comes last.
        operations: The operations that its ranks compare.
        reads: Its operations that torch runs on shards, such as `full_tensor()`; without a label. See `watched`.
        copies: Its gathered copies that are under way.
        step: Its repeated blocks, and the graph of its step, by which parameters are gathered for units.
        phase: Where the step stands.
        accumulating: True inside `accumulate(model)`. Captured code reads this boolean and the next one.
        gradients_stay_local: True while gradients are added up instead of reduced.
        sums_were_read: True if a compiled graph has been given sums that it may add to its gradients.
        reduces_once: True if the last `accumulate` reduced gradients once a step; at first the default of the stage.
        awaiting_last_backward: True from the first gradient under `accumulate` to the backward that ends the step.
        reducing_in: The backward that reduces what is left at its end, or was to and failed; -1 if there is none.
        reducing_after: id of the autograd node in which a backward runs that is not the end of the step.
        open_forwards: Forwards under a memory limit whose backward has not begun.
        limit_gaps: Reasons, seen at run time, why steps may have exceeded their memory limit.
        ignored: Places of the parameters that were left out: those of `ignored_params`.
        planner: Plans steps with the default options, until graphs of the model are compiled; the compiler sets it.
        ends_step: Called before an optimizer's step, from the first micro-batch that waits.
    """

    mesh: DeviceMesh
    axes: tuple[MeshAxis, ...]
    arguments: PartitionArguments
    root: nn.Module
    guard: Callable[[PartitionState], None]
    tensor_mesh: DeviceMesh | None = None
    parameter_mesh: DeviceMesh = field(init=False)
    parameters: list[ParameterState] = field(default_factory=list)
    operations: ModelOperations = field(init=False)
    reads: ModelOperations = field(init=False)
    copies: GatheredCopies = field(init=False)
    step: StepRun = field(init=False)
    phase: StepPhase = StepPhase.IDLE
    accumulating: bool = False
    gradients_stay_local: bool = False
    sums_were_read: bool = False
    reduces_once: bool = field(init=False)
    awaiting_last_backward: bool = False
    reducing_in: int = -1
    reducing_after: int = -1
    open_forwards: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    limit_gaps: list[str] = field(default_factory=list)
    ignored: set[tuple[nn.Module, str]] = field(default_factory=set)
    ends_step: Callable[[PartitionState, Optimizer], None] | None = None
    planner: ClassVar[Callable[..., StepPlan] | None] = None

    def __post_init__(self) -> None:
        tensor = self.tensor_mesh
        self.parameter_mesh = self.mesh if tensor is None else crossed_mesh(self.mesh, tensor)
        rows = [axis.group for axis in self.axes if axis.role is AxisRole.SHARD]
        slices = [] if tensor is None else [axis_group(tensor, 0).group_name]
        self.operations, self.reads = (ModelOperations(self.parameter_mesh, (*rows, *slices)) for _ in range(2))
        self.copies = GatheredCopies(self.operations)
        self.step = StepRun(self.operations, self.parameters)
        self._plan_steps()
        self.reduces_once = self.zero.reduces_once

    def _plan_steps(self) -> None:
        self.step.note_gradient = self.note_gradient
        if self.planner is not None:
            self.step.plans.make = partial(self.planner, self)

    @property
    def zero(self) -> ZeroStage:
        """The properties of the ZeRO stage."""
        return STAGES[self.arguments.stage]

    def distributed(self, local: Tensor, spec: ParameterSpec, *, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
        """Return this rank's part of a parameter as a `DTensor` of the full shape."""
        placements = placements_for(spec, self.mesh, is_tensor_parallel=self.tensor_mesh is not None)
        return DTensor.from_local(
            local,
            self.parameter_mesh,
            self.reads.watched(placements),
            run_check=False,
            shape=shape,
            stride=stride,
        )

    def add(self, entry: ParameterState) -> None:
        """Add a parameter, whose modules hold its shard already."""
        self.parameters.append(entry)
        entry.param.dsgraph_name = entry.name + self.operations.label  # type: ignore[attr-defined]
        entry.note_version()
        self.keep_copy(entry)

    def forget(self, entry: ParameterState, module: nn.Module, attribute: str) -> None:
        """Remove an owner of a parameter, and the parameter if it has no other owner."""
        entry.owners = [owner for owner in entry.owners if owner != (module, attribute)]
        if not entry.owners:
            self.parameters.remove(entry)
        held_by(module).parameters.pop(attribute, None)

    def refuse_amid_step(self, doing: str) -> None:
        """Refuse an action that would lose accumulated gradients.

        Raises:
            PartitionError: The model is inside `accumulate`, or its last backward is still to come.
        """
        if self.accumulating or self.gradients_stay_local:
            raise PartitionError(
                f"{doing} during a step of micro-batches, whose gradients would be lost: first run the last "
                "micro-batch outside dsgraph.accumulate(model), or call dsgraph.discard(model) there"
            )

    def move_to(self, phase: StepPhase) -> None:
        """Go on to another phase of the step; the same one again changes nothing."""
        assert phase is self.phase or phase in FOLLOWING[self.phase], f"a step that is {self.phase} becomes {phase}"
        self.phase = phase
        self.accumulating = phase in (StepPhase.REDUCING_EACH, StepPhase.ADDING)
        self.gradients_stay_local = phase in (StepPhase.ADDING, StepPhase.LAST, StepPhase.ENDING)
        self.step.in_step = self.accumulating and bool(self.step.limit.spare)
        if phase is StepPhase.IDLE:
            self.reducing_in = self.reducing_after = -1

    def before_update(self, optimizer: Optimizer) -> None:
        """End a step of micro-batches whose last backward this rank did not run."""
        if self.ends_step is not None:
            self.ends_step(self, optimizer)

    def copied(self) -> list[ParameterState]:
        """Return the parameters that have a gathered copy."""
        return [entry for entry in self.parameters if entry.gathered_copy is not None]

    def refresh(self, *, eagerly: bool = False, read: Tensor | None = None) -> None:
        """Start to gather every gathered copy that may differ from its shards: see `GatheredCopies.refresh`."""
        in_step = self.accumulating or self.awaiting_last_backward
        self.copies.refresh(self.copied(), in_step=in_step, eagerly=eagerly, read=read)

    def keep_copy(self, entry: ParameterState) -> None:
        """Stages 1 and 2: allocate the gathered copy of a sharded parameter, empty and stale."""
        if not entry.spec.group or self.zero.copy_lifetime is not CopyLifetime.ALWAYS:
            return
        entry.gathered_copy = new_copy(entry)
        keep_static(entry.gathered_copy)
        entry.gathered_copy.dsgraph_partition = self  # type: ignore[attr-defined]  # a graph that reads it refreshes it
        entry.freshness = Freshness.STALE

    def note_gradient(self) -> None:
        """Note that a gradient was computed: unless the step goes on, expect an update of the shards."""
        self.copies.finish()  # what a backward reads must not be written to
        self.awaiting_last_backward = self.accumulating
        if self.accumulating:
            return
        for entry in self.copied():
            entry.freshness = min(entry.freshness, Freshness.SUSPECT)

    def give_up_step(self) -> None:
        """Drop the micro-batches of a step. An update of the shards may follow, or another step."""
        self.copies.finish()
        self.step.release_held()
        self.awaiting_last_backward = False
        for entry in self.copied():
            entry.freshness = min(entry.freshness, Freshness.SUSPECT)

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped: gathered copies of its parameters are stale.

        Fused steps leave no other trace.
        """
        self.operations.updates += 1
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self.step.release_held()
        for entry in self.parameters:
            entry.updates += id(entry.param) in stepped

    def __getstate__(self) -> dict[str, Any]:
        self.copies.finish()  # a copy of a gathered copy would never arrive
        step = ("accumulating", "gradients_stay_local", "sums_were_read", "awaiting_last_backward")
        operations = replace(self.operations, label=self.operations.label or " of a copy")
        idle = {"reducing_in": -1, "reducing_after": -1, "phase": StepPhase.IDLE}
        ranks = {"operations": operations, "copies": GatheredCopies(operations), "step": self.step.copy(operations)}
        limits: dict[str, Any] = {"open_forwards": weakref.WeakSet(), "limit_gaps": []}
        return {**self.__dict__, **dict.fromkeys(step, False), **idle, **ranks, **limits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._plan_steps()
        self.guard(self)


@dataclass(eq=False)
class PartitionedModule:
    """The parameters of one module of a partitioned model, as it returns them.

    Attributes:
        partition: The model that it is part of.
        parameters: Its parameters, by attribute.
        equal_buffers: Names of its buffers that have the values of the mesh's first rank.
    """

    partition: PartitionState
    parameters: dict[str, ParameterState] = field(default_factory=dict)
    equal_buffers: set[str] = field(default_factory=set)


def hold(module: nn.Module, part: PartitionState) -> PartitionedModule:
    """Return `held_by` of a module of `part`; create it if there is none."""
    if "_dsgraph" not in module.__dict__:
        object.__setattr__(module, "_dsgraph", PartitionedModule(part))
    return held_by(module)


def held_by(module: nn.Module) -> PartitionedModule:
    """Return what a module of a partitioned model needs to return its parameters."""
    held: PartitionedModule = module._dsgraph  # type: ignore[assignment]
    return held


def partition_states(model: nn.Module) -> list[PartitionState]:
    """Return the states of all partitioned modules inside `model`, in module order."""
    found: dict[int, PartitionState] = {}
    for module in model.modules():
        held = module.__dict__.get("_dsgraph")
        if held is not None:
            found.setdefault(id(held.partition), held.partition)
    return list(found.values())

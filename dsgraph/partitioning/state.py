"""What a partitioned model remembers besides its shards: gathered copies, and when they went stale."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dsgraph.compat.autograd import at_end_of_backward
from dsgraph.inductor_ext import c10d_functional

from .gathered_copies import new_copy, start_gathers, were_written
from .guards import guard
from .parameter import Freshness, ParameterState
from .partition import partition as _partition
from .restore import restored_on_error
from .stages import CopyLifetime
from .table import PartitionedModel, ShardedParameter, held_by, partitioned_parts

PartitionT = TypeVar("PartitionT", bound=Callable[..., Any])


class StepPhase(Enum):
    """Where a model stands between two optimizer steps; `_FOLLOWING` says what may come next."""

    IDLE = "idle"
    """Outside `accumulate`, nothing added up: each backward reduces its gradients."""
    REDUCING_EACH = "reducing each"
    """Inside `accumulate`, and each backward reduces its gradients."""
    ADDING = "adding"
    """Inside `accumulate`: gradients are added up on this rank."""
    LAST = "last"
    """Outside, behind `ADDING`: the next backward ends the step."""
    ENDING = "ending"
    """That backward runs, and reduces at its end what its graphs have not; or it has failed, and another one will."""


_FOLLOWING = {
    StepPhase.IDLE: (StepPhase.REDUCING_EACH, StepPhase.ADDING),
    StepPhase.REDUCING_EACH: (StepPhase.IDLE, StepPhase.ADDING),
    StepPhase.ADDING: (StepPhase.LAST, StepPhase.IDLE),
    StepPhase.LAST: (StepPhase.ENDING, StepPhase.ADDING, StepPhase.IDLE),
    StepPhase.ENDING: (StepPhase.IDLE, StepPhase.ADDING),
}


@dataclass(eq=False)
class PartitionState(PartitionedModel):
    """A partitioned model, with what outlives a graph between two optimizer steps.

    Attributes:
        phase: Where the step stands; `accumulating` and `gradients_stay_local` say as much to the modules.
        sums_were_read: Whether a compiled graph has been given sums that it may add to its gradients.
        under_way: Gathered copies that may not have arrived yet.
        step_room: Bytes that stage 3 may hold for a step of micro-batches; None while that is not known.
        reduces_once: Whether `accumulate` reduces gradients once a step, as it did last; at first as the stage does.
        awaiting_last_backward: True from the first gradient under `accumulate` to the backward that ends the step.
        reducing_in: The backward that reduces what is left at its end, or was to and failed; -1 if there is none.
        watching: id of the state whose optimizer hook is registered; a deep copy must register its own.
        open_forwards: Forwards under a memory limit whose backward has not begun.
        limit_gaps: Reasons, seen at run time, why steps may have exceeded their memory limit.
        ends_step: Is called ahead of an optimizer's step, from the first micro-batch that waits.
    """

    parameters: list[ParameterState] = field(default_factory=list)  # type: ignore[assignment]
    phase: StepPhase = StepPhase.IDLE
    under_way: list[Tensor] = field(default_factory=list)
    step_room: int | None = None
    sums_were_read: bool = False
    reduces_once: bool = field(init=False)
    awaiting_last_backward: bool = False
    reducing_in: int = -1
    watching: int = 0
    open_forwards: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    limit_gaps: list[str] = field(default_factory=list)
    ends_step: Callable[[PartitionState, Optimizer], None] | None = None

    def __post_init__(self) -> None:
        self.reduces_once = self.zero.reduces_once
        guard(self)

    def move_to(self, phase: StepPhase) -> None:
        """Goes on to another phase of the step; the same one again changes nothing."""
        assert phase is self.phase or phase in _FOLLOWING[self.phase], f"a step that is {self.phase} becomes {phase}"
        self.phase = phase
        # Captured code reads plain booleans.
        self.accumulating = phase in (StepPhase.REDUCING_EACH, StepPhase.ADDING)
        self.gradients_stay_local = phase in (StepPhase.ADDING, StepPhase.LAST, StepPhase.ENDING)
        if phase is StepPhase.IDLE:
            self.reducing_in = -1

    def copied(self) -> list[ParameterState]:
        """The parameters of which a gathered copy is kept."""
        return [entry for entry in self.parameters if entry.gathered_copy is not None]

    def before_update(self, optimizer: Optimizer) -> None:
        """Ends a step of micro-batches whose last backward this rank did not run."""
        if self.ends_step is not None:
            self.ends_step(self, optimizer)

    def refresh(self, *, eagerly: bool = False, read: Tensor | None = None) -> None:
        """Starts to gather every gathered copy that may differ from its shards. All ranks call it at the same point.

        Whatever reads a gathered copy afterwards waits for it: a graph by `AwaitCopies`, eager code by `arrived`.
        """
        in_step = self.accumulating or self.awaiting_last_backward
        stale = [entry for entry in self.copied() if entry.observe() is not Freshness.FRESH]
        if not in_step and not torch.is_grad_enabled():
            stale += self._written_without_trace(read, eagerly=eagerly)
        if not stale:
            return
        self.watch_updates()
        self.finish()
        self.under_way = [entry.gathered_copy for entry in stale if entry.gathered_copy is not None]
        what = f"{len(stale)} parameters, {stale[0].name!r} first"
        with self.gathering(what, waits=eagerly, outside=None if eagerly else False):
            start_gathers(stale)
        for entry in stale:
            # With a gradient at hand, an optimizer may still write to the shard in a way that leaves no trace (through
            # `.data`): trust the gathered copy only within an accumulated step, where nothing is updated.
            trusted = in_step or entry.param.grad is None
            entry.mark_gathered(Freshness.FRESH if trusted else Freshness.SUSPECT)

    def _written_without_trace(self, read: Tensor | None, *, eagerly: bool) -> list[ParameterState]:
        """Gathered copies that were fresh before somebody wrote to the shards through `.data`.

        So are models written to that are not trained, such as a moving average of another one.
        """
        fresh = [
            entry
            for entry in self.copied()
            if entry.freshness is Freshness.FRESH and (not eagerly or entry.gathered_copy is read)
        ]
        if not fresh:
            return []
        what = f"{fresh[0].name!r} where it was written"
        with self.gathering(what, waits=eagerly, outside=None if eagerly else False):
            if not were_written(fresh):
                return []
        for entry in fresh:
            entry.freshness = Freshness.STALE
        return fresh

    def take_in(self, entry: ShardedParameter) -> None:
        """Adds a parameter, whose modules hold its shard already."""
        state = ParameterState(**vars(entry))
        self.parameters.append(state)
        state.param.dsgraph_name = state.name + self.label  # type: ignore[attr-defined]
        state.note_version()
        self.note_materialized(state)

    def tie(self, entry: ShardedParameter, module: nn.Module, attribute: str) -> None:
        """Gives a module that was added the gathered copy of a parameter that it holds as well."""
        assert isinstance(entry, ParameterState)
        if entry.gathered_copy is not None:
            held_by(module).gathered_copies[attribute] = entry.gathered_copy

    def note_materialized(self, entry: ShardedParameter) -> None:
        """Stages 1 and 2: gives a parameter, if it is sharded, the gathered copy that is kept of it."""
        assert isinstance(entry, ParameterState)
        if entry.layout.group and self.zero.copy_lifetime is CopyLifetime.ALWAYS:
            self._add_copy(entry)

    def _add_copy(self, entry: ParameterState) -> None:
        """Gives a sharded parameter a gathered copy, empty and stale."""
        entry.gathered_copy = new_copy(entry.layout, entry.rows, self)
        entry.freshness = Freshness.STALE
        for module, attribute in entry.owners:
            held_by(module).gathered_copies[attribute] = entry.gathered_copy

    def hold_copies(self) -> None:
        """Stage 3: makes gathered copies, still stale, of what is held for the step, unless it has some."""
        if self.copied():
            return
        for entry in self.parameters:
            if entry.is_held_for_step:
                self._add_copy(entry)

    def release_copies(self) -> None:
        """Lets go of gathered copies that were held for a step. What autograd has saved lives as long as its graph."""
        self.finish()
        for entry in self.copied():
            entry.gathered_copy = None
            for module, attribute in entry.owners:
                del held_by(module).gathered_copies[attribute]

    def arrived(self, tensor: Tensor) -> Tensor:
        """A gathered copy, when it has arrived; any other tensor at once."""
        if self.under_way:
            with torch.no_grad():
                c10d_functional.wait_tensor(tensor.detach())
        return tensor

    def finish(self) -> None:
        """Waits for all gathered copies that are still under way, be it that no graph has read them."""
        for gathered_copy in self.under_way:
            self.arrived(gathered_copy)
        self.under_way = []

    def __getstate__(self) -> dict[str, Any]:
        self.finish()  # a copy of a gathered copy would never arrive
        step = ("accumulating", "gradients_stay_local", "sums_were_read", "awaiting_last_backward")
        label = self.label or " of a copy"
        idle = {"reducing_in": -1, "phase": StepPhase.IDLE, "label": label}
        limits: dict[str, Any] = {"open_forwards": weakref.WeakSet(), "limit_gaps": []}
        return {**self.__dict__, **dict.fromkeys(step, False), **idle, **limits}

    def note_gradient(self) -> None:
        """A gradient went through the seam: unless the step goes on, expect an update of the shards.

        What stage 3 has held for the step is let go when the backward is through.
        """
        self.finish()  # what a backward reads must not be written to
        self.awaiting_last_backward = self.accumulating
        if self.accumulating:
            return
        for entry in self.copied():
            entry.freshness = min(entry.freshness, Freshness.SUSPECT)
        if self.zero.gathers_each_use and self.copied():
            at_end_of_backward(self.release_copies)

    def note_compressed(self, name: str) -> None:
        """A momentum takes in one gradient a step, be it reduced in a graph or outside."""
        for entry in self.parameters:
            if entry.name == name and entry.compression is not None:
                entry.compression.note_arrival()

    def give_up_step(self) -> None:
        """The micro-batches of a step were in vain. What follows may be an update of the shards, or another step."""
        self.finish()
        self.awaiting_last_backward = False
        for entry in self.copied():
            entry.freshness = min(entry.freshness, Freshness.SUSPECT)
        if self.zero.gathers_each_use and not self.accumulating:
            self.release_copies()

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: gathered copies of its parameters are stale. Fused steps leave no other trace."""
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for entry in self.copied():
            if id(entry.param) in stepped:
                entry.freshness = Freshness.STALE
        if self.zero.gathers_each_use and any(entry.freshness is Freshness.STALE for entry in self.copied()):
            self.awaiting_last_backward = False  # each micro-batch was inside `accumulate`
            self.release_copies()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        guard(self)

    def watch_updates(self) -> None:
        """From here on hears of the steps of optimizers."""
        if self.watching == id(self):
            return
        self.watching = id(self)
        state = weakref.ref(self)

        @torch.compiler.disable  # where the step itself is compiled
        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            living = state()
            if living is not None:
                living.note_step(optimizer)

        handle = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, handle.remove)


def with_steps(partition: PartitionT) -> PartitionT:
    """`partition`, of whose models gathered copies and gradients are kept between two optimizer steps."""

    @wraps(partition)
    def partition_and_keep(*args: Any, **kwargs: Any) -> nn.Module:
        given = args[0] if args else kwargs.get("model")
        if not isinstance(given, nn.Module):
            return partition(*args, **kwargs)  # which refuses it
        with restored_on_error(given):
            return partition_with_state(*args, **kwargs)

    def partition_with_state(*args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = partition(*args, **kwargs)
        for part in partitioned_parts(model):
            if isinstance(part, PartitionState):
                continue
            state = PartitionState(
                part.mesh, part.axes, part.arguments, part.root, no_regions=part.no_regions, label=part.label
            )
            for module in model.modules():
                if "_dsgraph" in module.__dict__ and held_by(module).partition is part:
                    held_by(module).partition = state
            for entry in part.parameters:
                state.take_in(entry)
        return model

    return cast("PartitionT", partition_and_keep)


partition = with_steps(_partition)


def partition_states(model: nn.Module) -> list[PartitionState]:
    """The states of all partitioned modules inside `model`, in module order."""
    return [part for part in partitioned_parts(model) if isinstance(part, PartitionState)]

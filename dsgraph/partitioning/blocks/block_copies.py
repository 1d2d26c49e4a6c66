"""The gathered copies of one block, whose memory exists around the block's runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dsgraph.compat.autograd import version_of
from dsgraph.inductor_ext import c10d_functional
from dsgraph.partitioning.gathered_copies import new_copy, start_gathers
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.ranks.model_operations import ModelOperations


class Plan(Protocol):
    """The plan that gathers blocks: see `GatherPlan`.

    Attributes:
        operations: The model's operations, which ranks compare.
        forwards: Number of forwards so far.
        gathers_ahead: False if nothing is gathered before its use.
    """

    operations: ModelOperations
    forwards: int
    gathers_ahead: bool

    def run_graph(
        self, numbers: Sequence[int], compiled: Callable[..., Any], args: Sequence[Any], *, waits: bool
    ) -> Any:
        """Call a compiled graph that reads copies of blocks."""


@dataclass(eq=False)
class BlockCopies:
    """The gathered copies of a block's sharded parameters.

    A copy is one tensor, whose memory is taken before the block runs, forward or backward, and released afterwards.
    Autograd saves the tensor, so it sees the memory that comes back.

    Attributes:
        name: The block's name in the model.
        plan: The plan of its model.
        entries: Its parameters; a tied one belongs to its first block.
        running: Number of the block's calls that run now.
        is_present: True while the copies have memory; they may still be gathering.
        has_arrived: True if the gather has completed.
        is_read: False if no graph read them in the block's last call, so that there is nothing to gather before it.
        is_kept: True if they were kept after a forward for the backward that should follow.
    """

    name: str
    plan: Plan
    entries: list[ParameterState]
    running: int = 0
    is_present: bool = False
    has_arrived: bool = True
    is_read: bool = True
    is_kept: bool = False
    _gathered_in: int = -1
    _gathered_from: dict[ParameterState, tuple[Any, int]] = field(default_factory=dict)

    def start(self) -> None:
        """Start to gather the copies, unless they are present and equal to the shards.

        Copies from an earlier forward are gathered again, because a write through `.data` leaves no trace.
        """
        changed = [entry for entry in self.entries if self._gathered_from.get(entry) != _state_of(entry)]
        if self.is_present:
            if self._gathered_in == self.plan.forwards and not changed:
                return
            self.release()
        if not self.entries:
            return
        with self.plan.operations.gathering(f"block {self.name!r}", outside=False):
            pairs = [(entry, self._current_copy(entry)) for entry in self.entries]
            self._take_memory()
            start_gathers(pairs)
        for entry in changed:  # what autograd saved before the change is not valid any more
            torch.autograd.graph.increment_version(_copy_of(entry))
        self._gathered_in = self.plan.forwards
        self._gathered_from = {entry: _state_of(entry) for entry in self.entries}

    def note_step(self, stepped: Collection[int]) -> None:
        """Note that an optimizer has stepped on the parameters with these ids. A fused step leaves no other trace."""
        for entry in self.entries:
            if id(entry.param) in stepped:
                self._gathered_from.pop(entry, None)

    def wait(self) -> None:
        """Wait until the copies have arrived."""
        if self.has_arrived:
            return
        with torch.no_grad():
            for entry in self.entries:
                c10d_functional.wait_tensor(_copy_of(entry).detach())
        self.has_arrived = True

    def release(self) -> None:
        """Release the memory; without any, do nothing."""
        if not self.is_present:
            return
        self.wait()
        self.is_present = self.is_kept = False
        for entry in self.entries:
            _copy_of(entry).untyped_storage().resize_(0)

    def abandon(self) -> None:
        """Release the memory after an error; memory that may still be written to is left to the running transfer."""
        try:
            self.release()
        except RuntimeError:
            self.forget()

    def forget(self) -> None:
        """Drop the copies. Later runs get new ones."""
        self.is_present, self.is_kept, self.has_arrived = False, False, True
        self._gathered_from = {}
        for entry in self.entries:
            entry.block_copy = None

    def keep_for_outputs(self, outputs: Sequence[Any]) -> None:
        """Leave the memory of a copy to outputs that share it, which may be read at any time, and take a new copy."""
        for entry in self.entries:
            copy = _copy_of(entry)
            memory = copy.untyped_storage().data_ptr()
            if any(isinstance(out, Tensor) and out.untyped_storage().data_ptr() == memory for out in outputs):
                self.wait()
                entry.block_copy = None
                self._current_copy(entry)
                self._gathered_in = -1  # the new copy has no memory

    def _take_memory(self) -> None:
        try:
            for entry in self.entries:
                _copy_of(entry).untyped_storage().resize_(entry.copy_bytes)
        except RuntimeError:  # out of memory
            for entry in self.entries:
                _copy_of(entry).untyped_storage().resize_(0)
            raise
        self.is_present, self.has_arrived = True, False

    def _current_copy(self, entry: ParameterState) -> Tensor:
        """Return a parameter's copy, a new one without memory if its dtype or device has changed."""
        copy, param = entry.block_copy, entry.param
        if copy is None or copy.dtype != entry.spec.dtypes(param.dtype)[0] or copy.device != param.device:
            with torch.inference_mode(False):
                copy = new_copy(entry)
            copy.untyped_storage().resize_(0)
            copy.dsgraph_block, copy.dsgraph_entry = self, entry  # type: ignore[attr-defined]  # who gathers it
            entry.block_copy = copy
        return copy

    def __getstate__(self) -> dict[str, Any]:
        idle = {"running": 0, "is_present": False, "has_arrived": True, "is_read": True, "is_kept": False}
        return {**self.__dict__, **idle, "_gathered_in": -1, "_gathered_from": {}}


def _state_of(entry: ParameterState) -> tuple[Any, int]:
    """Return the parameter and its version, by which a change of it is seen."""
    param = entry.param
    return id(param), version_of(param)


def _copy_of(entry: ParameterState) -> Tensor:
    assert entry.block_copy is not None
    return entry.block_copy

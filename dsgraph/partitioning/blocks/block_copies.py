"""The parameters of one block: gathered copies, whose memory exists around the block's runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.compat.autograd import has_saved_tensor_hooks, version_of
from dsgraph.compat.dynamo import keep_static, may_end_frame
from dsgraph.inductor_ext import c10d_functional
from dsgraph.partitioning.eager.replaced_data import refuse_replaced_data
from dsgraph.partitioning.gathered_copies import new_copy, start_gathers
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.passes.analysis.block_memory import BlockMemory
from dsgraph.ranks.model_operations import ModelOperations

from .block_limit import BlockLimit
from .block_reads import Finish, RunningReduction, read_in_place, start_reductions

NEED_ONE_GRAPH = ("activation_offload", "strict", "pipeline", "kernels")
"""Options of the backend that need a graph of the whole model.

`activation_offload` moves values while other blocks compute; `strict` allows no uncompiled code between blocks; passes
and kernels that a user names are for the whole model.
"""


class Plan(Protocol):
    """The plan of a model's blocks: see `BlockPlan`.

    Attributes:
        operations: The model's operations, which ranks compare.
        forwards: Number of forwards so far.
        gathers_ahead: False if nothing is gathered before its use.
        limit: The state of a `memory_limit`.
    """

    operations: ModelOperations
    forwards: int
    gathers_ahead: bool
    limit: BlockLimit

    def run_graph(
        self, numbers: Sequence[int], compiled: Callable[..., Any], args: Sequence[Any], *, waits: bool
    ) -> Any:
        """Call a compiled graph that reads copies of blocks."""

    def finish_later(self, reductions: Sequence[RunningReduction]) -> None:
        """Take over reductions, to be finished at the end of the backward at the latest."""


def may_end_graph(plan: Plan, *, in_checkpoint: bool = False) -> bool:
    """Return True if the graph that Dynamo captures may end at a block.

    Args:
        plan: The plan of the model's blocks.
        in_checkpoint: See `may_end_frame`.
    """
    if not may_end_frame(*NEED_ONE_GRAPH, in_checkpoint=in_checkpoint):
        return False
    if plan.limit.is_kept or not torch.is_grad_enabled():
        return True
    return may_end_frame("memory_limit", in_checkpoint=in_checkpoint)


@dataclass(eq=False)
class BlockCopies:
    """The parameters of a block; of the sharded ones, the gathered copies.

    A copy is one tensor, whose memory is taken before the block runs, forward or backward, and released afterwards.
    Autograd saves the tensor, so it sees the memory that comes back.

    Attributes:
        name: The block's name in the model.
        plan: The plan of its model.
        entries: Its sharded parameters; a tied one belongs to its first block.
        replicated: Its replicated parameters.
        running: Number of the block's calls that run now.
        is_present: True while the copies have memory; they may still be gathering.
        has_arrived: True if the gather has completed.
        is_read: False if no graph read them in the block's last call, so that there is nothing to gather before it.
        is_kept: True if they were kept after a forward for the backward that should follow.
        is_held: True if they were kept after a backward for the next micro-batch of the step.
    """

    name: str
    plan: Plan
    entries: list[ParameterState]
    replicated: list[ParameterState] = field(default_factory=list)
    running: int = 0
    is_present: bool = False
    has_arrived: bool = True
    is_read: bool = True
    is_kept: bool = False
    is_held: bool = False
    _gathered_in: int = -1
    _gathered_from: dict[ParameterState, tuple[Any, int]] = field(default_factory=dict)
    _reads: list[dict[ParameterState, Tensor]] = field(default_factory=list, repr=False)

    def start(self) -> None:
        """Start to gather the copies, unless they are present and equal to the shards.

        Copies from an earlier forward are gathered again, because a write through `.data` leaves no trace.
        """
        changed = [entry for entry in self.entries if self._gathered_from.get(entry) != _state_of(entry)]
        if self.is_present:
            if not changed and (self.is_held or self._gathered_in == self.plan.forwards):
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

    def begin_call(self) -> None:
        """Note that a call of the block begins."""
        self.running += 1
        self._reads.append({})

    def end_call(self) -> None:
        """End the call that began last; graphs read what they read before it."""
        self.running -= 1
        for entry in self._reads.pop():
            entry.block_read = None
        for reads in self._reads[-1:]:
            for entry, tensor in reads.items():
                entry.block_read = tensor

    def hand_out(self) -> None:
        """Let graphs of the running call read the parameters, differentiable with respect to their shards."""
        read = [entry for entry in (*self.entries, *self.replicated) if _may_be_read(entry)]
        for entry in read:
            refuse_replaced_data(entry.param, entry.name)
        full = {entry: self._full(entry) for entry in read}
        trained = [entry for entry in read if entry.param.requires_grad and not torch.is_inference_mode_enabled()]
        if trained:
            own = [full[entry] for entry in trained]
            with torch.enable_grad():  # which the block itself may turn on
                outputs = read_in_place(trained, own, start=self._start_reductions, hand=self.plan.finish_later)
            full |= zip(trained, outputs, strict=True)
        for entry, tensor in full.items():
            keep_static(tensor)
            if entry.spec.group:
                tensor.dsgraph_block, tensor.dsgraph_entry = self, entry  # type: ignore[attr-defined]
            entry.block_read = tensor
        self._reads[-1] = full

    def trained(self) -> list[ParameterState]:
        """Return the parameters that require a gradient."""
        return [entry for entry in (*self.entries, *self.replicated) if entry.param.requires_grad]

    def memory(self) -> BlockMemory:
        """Return the memory that the block needs besides its graphs."""
        trained = self.trained()
        return BlockMemory(
            name=self.name,
            copies=sum(entry.copy_bytes for entry in self.entries),
            full_gradients=sum(
                entry.spec.numel * entry.spec.dtypes(entry.param.dtype)[1].itemsize for entry in trained
            ),
            gradients=sum(entry.gradient_bytes for entry in trained),
        )

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
        self.is_present = self.is_kept = self.is_held = False
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
        self.is_present = self.is_kept = self.is_held = False
        self.has_arrived = True
        self._gathered_from = {}
        for entry in self.entries:
            entry.block_copy = None

    def keep_for_readers(self, outputs: Sequence[Any]) -> list[ParameterState]:
        """Replace the copies that others may read at any time, whose memory lives as long as these readers.

        Readers are outputs that share the memory, and hooks of autograd, which get what it saves.

        Returns:
            The parameters whose copies were replaced.
        """
        is_saved, replaced = has_saved_tensor_hooks(), []
        for entry in self.entries:
            copy = _copy_of(entry)
            memory = copy.untyped_storage().data_ptr()
            shares = (isinstance(out, Tensor) and out.untyped_storage().data_ptr() == memory for out in outputs)
            if is_saved or any(shares):
                self.wait()
                entry.block_copy = None
                self._current_copy(entry)
                self._gathered_in = -1  # the new copy has no memory
                replaced.append(entry)
        return replaced

    def _full(self, entry: ParameterState) -> Tensor:
        """Return a parameter's full value; that of a sharded one arrives later."""
        if entry.spec.group:
            return self._current_copy(entry).detach()
        return entry.rows.to(entry.spec.dtypes(entry.param.dtype)[0]).detach()

    def _start_reductions(self, pairs: Sequence[tuple[ParameterState, Tensor]]) -> list[Finish]:
        # Ranks whose batches use different parameters are to raise an error, not to wait for each other.
        names = "" if len(pairs) == len(self.trained()) else " of " + ", ".join(entry.name for entry, _ in pairs)
        with self.plan.operations.reducing(f"the gradients{names} in block {self.name!r}"):
            return start_reductions(pairs)

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
        idle = {
            "running": 0,
            "is_present": False,
            "has_arrived": True,
            "is_read": True,
            "is_kept": False,
            "is_held": False,
        }
        return {**self.__dict__, **idle, "_gathered_in": -1, "_gathered_from": {}, "_reads": []}


def _may_be_read(entry: ParameterState) -> bool:
    """Return False for a parameter that something else replaces: a copy that is held for a step, a user's tensor."""
    return entry.gathered_copy is None and isinstance(entry.param, DTensor)


def _state_of(entry: ParameterState) -> tuple[Any, int]:
    """Return the parameter and its version, by which a change of it is seen."""
    param = entry.param
    return id(param), version_of(param)


def _copy_of(entry: ParameterState) -> Tensor:
    assert entry.block_copy is not None
    return entry.block_copy

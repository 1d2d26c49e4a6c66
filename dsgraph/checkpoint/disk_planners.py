"""Saving and loading of tensors on disk without bringing all of them into memory."""

from __future__ import annotations

import io
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, WriteItem
from torch.optim import Optimizer
from typing_extensions import override

from dsgraph.offload.stored_rows import StoredRows, stored_rows
from dsgraph.offload.stored_tensor import StoredTensor, room
from dsgraph.optim.hooks import hooks_of
from dsgraph.optim.stored_state import StoredState
from dsgraph.partitioning.rows import own_part

_HALF = "was not read to its end from a checkpoint, and is neither the old one nor the new one: load a checkpoint"


class SavePlannerFromDisk(DefaultSavePlanner):
    """A save planner that reads each tensor from disk when it is written: `dcp.save(..., planner=...)`.

    Without it tensors are mapped: the kernel drops pages when it needs memory, and ends the process if the disk fails.
    """

    def __init__(self, optimizer: Optimizer | None, *, frees_written: bool = False) -> None:
        """Create a planner for a state dict with the state of an optimizer, and parameters.

        Args:
            optimizer: The optimizer whose state is written; None: only parameters are.
            frees_written: True frees the memory of a tensor when the same thread asks for the next one, so that each
                thread has one in memory. The writer must have written it by then: one that holds several, like that of
                safetensors, and torch's with one thread and CUDA, would write zeros.
        """
        super().__init__()
        self._state = None if optimizer is None else optimizer.state
        self._frees_written = frees_written
        self._written = threading.local()

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        found = super().resolve_data(write_item)
        stored = stored_tensor(found, self._state) if isinstance(found, Tensor) else None
        if stored is None:
            return found
        if not self._frees_written:
            return stored.read()
        # `torch.save` leaves what it has written in a cycle, which holds the memory until somebody collects garbage.
        last = getattr(self._written, "last", None)
        if last is not None:
            last.madvise(mmap.MADV_DONTNEED)
        value, self._written.last = stored.read_memory()
        return value


class LoadPlannerToDisk(DefaultLoadPlanner):
    """A load planner that writes each tensor to disk when it is read: `dcp.load(..., planner=...)`.

    So one tensor is in memory at a time. It is for parameters and the tensors of the optimizer's state dict; tensors in
    memory are read as usual. Without it, the state would be read to memory only.

    Attributes:
        has_begun: True if the ranks have begun to read.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        """Create a planner for a state dict with the state of an optimizer, and parameters."""
        super().__init__()
        self._state = None if optimizer is None else optimizer.state
        self.has_begun = False

    @override
    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.has_begun = True
        return super().finish_plan(new_plan)

    @override
    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        stored = self._stored(read_item)
        if stored is not None:
            return room(read_item.lengths, stored.dtype)
        found: Tensor = super().resolve_tensor(read_item)
        return found

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        stored = self._stored(read_item)
        if stored is not None:
            stored.write(tensor, read_item.dest_offsets)

    def _stored(self, read_item: ReadItem) -> StoredTensor | None:
        return stored_tensor(self.lookup_tensor(read_item.dest_index), self._state)


def stored_tensor(value: Tensor, state: object) -> StoredTensor | None:
    """Return the place of a tensor that is a parameter's rows on disk, or in an optimizer's state; None: in memory."""
    rows = stored_rows(value)
    if rows is not None:
        return rows.stored
    return state.stored(value) if isinstance(state, StoredState) and value.numel() else None


@contextmanager
def loading_to_disk(
    params: Sequence[nn.Parameter], optimizer: Optimizer | None, *, module_only: bool
) -> Iterator[LoadPlannerToDisk]:
    """Enter a context for a `dcp.load`, with the returned planner, into the tensors of a model and its optimizer.

    If it fails after something was read, the result cannot be used for training: forwards are refused, and steps as
    well if state was read, until another load of as much succeeds.

    Args:
        params: The parameters of the partitioned model.
        optimizer: The optimizer of these.
        module_only: True if nothing is read into the optimizer.

    Raises:
        OffloadError: A backward has begun a step; nothing was read.
    """
    hooks = hooks_of(optimizer)
    hooks.refuse_load()
    planner = LoadPlannerToDisk(optimizer)
    try:
        yield planner
    except BaseException as error:  # which torch's CheckpointException is
        if planner.has_begun:
            for rows in _rows_of(params):
                rows.held_for = _HALF
            if not module_only:
                hooks.refuse_steps(error)
        raise
    torch.autograd.graph.increment_version(params)
    for rows in _rows_of(params):
        rows.held_for = ""
        rows.forget_reads()
    if not module_only:
        hooks.refuse_steps(None)


def refuse_half(params: Iterable[nn.Parameter], optimizer: Optimizer | None) -> None:
    """Refuse to save tensors after a failed load or step: some of them are old, and some new.

    Raises:
        OffloadError: Parameters on disk, or the state of the optimizer there, are in such a state; or a backward has
            updated some of them, and the step is not over.
    """
    for rows in _rows_of(params):
        rows.refuse_held()
    hooks_of(optimizer).refuse_failed()


def _rows_of(params: Iterable[nn.Parameter]) -> Iterator[StoredRows]:
    for param in params:
        rows = stored_rows(own_part(param))
        if rows is not None:
            yield rows

"""Full parameters outside graphs: gathered copies that stay, and what is gathered where it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsgraph.compat.autograd import keeping_version
from dsgraph.inductor_ext import (
    Ranks,
    c10d_functional,
    chunk_rows,
    resolve_group,
    start_gathers_in_place,
    sum_over,
)
from dsgraph.ranks.model_operations import ModelOperations

from .parameter import Freshness, ParameterState


@dataclass(eq=False)
class GatheredCopies:
    """The gathered copies of one model that are being gathered.

    Attributes:
        operations: The model's operations, which ranks compare.
        under_way: Gathered copies that may not have arrived yet.
    """

    operations: ModelOperations
    under_way: list[Tensor] = field(default_factory=list)

    def refresh(
        self, copied: list[ParameterState], *, in_step: bool, eagerly: bool = False, read: Tensor | None = None
    ) -> None:
        """Start to gather every gathered copy that may differ from its shards. All ranks call it at the same point.

        Whatever reads a gathered copy afterwards waits for it: a graph by `AwaitCopies`, eager code by `arrived`.

        Args:
            copied: The parameters that have a gathered copy.
            in_step: True in a step of micro-batches, in which no optimizer writes to shards.
            eagerly: True if eager code reads them: then the ranks compare what they gather.
            read: The gathered copy that the eager code of a forward reads.
        """
        stale = [entry for entry in copied if self._needs_gather(entry, read)]
        if not in_step and not torch.is_grad_enabled():
            stale += self._written_without_trace(copied, read, eagerly=eagerly)
        if not stale:
            return
        self.finish()
        self.under_way = [entry.gathered_copy for entry in stale if entry.gathered_copy is not None]
        what = f"{len(stale)} parameters, {stale[0].name!r} first"
        with self.operations.gathering(what, waits=eagerly, outside=None if eagerly else False):
            start_gathers([(entry, _copy_of(entry)) for entry in stale])
        for entry in stale:
            if entry.freshness is Freshness.STALE:
                torch.autograd.graph.increment_version(_copy_of(entry))
        for entry in stale:
            # With a gradient at hand, an optimizer may still write to the shard in a way that leaves no trace (through
            # `.data`): trust the gathered copy only within an accumulated step, where nothing is updated.
            trusted = in_step or entry.param.grad is None
            entry.mark_gathered(Freshness.FRESH if trusted else Freshness.SUSPECT)

    def _needs_gather(self, entry: ParameterState, read: Tensor | None) -> bool:
        """Return True if a copy is stale, or if it is suspect and about to be read.

        Copies stay suspect while there is a gradient. Eager code reads one parameter at a time, so if each read
        gathered all suspect copies, a forward would gather each of them once a parameter.
        """
        freshness = entry.observe()
        is_read = read is None or entry.gathered_copy is read
        return freshness is Freshness.STALE or (freshness is Freshness.SUSPECT and is_read)

    def _written_without_trace(
        self, copied: list[ParameterState], read: Tensor | None, *, eagerly: bool
    ) -> list[ParameterState]:
        """Return the parameters whose gathered copy was fresh until somebody wrote to the shards through `.data`.

        Models that are not trained are written to in this way, such as a moving average of another model.
        """
        fresh = [
            entry
            for entry in copied
            if entry.freshness is Freshness.FRESH and (not eagerly or entry.gathered_copy is read)
        ]
        if not fresh:
            return []
        what = f"{fresh[0].name!r} where it was written"
        with self.operations.gathering(what, waits=eagerly, outside=None if eagerly else False):
            if not were_written(fresh):
                return []
        for entry in fresh:
            entry.freshness = Freshness.STALE
        return fresh

    def arrived(self, tensor: Tensor) -> Tensor:
        """Return a gathered copy when it has arrived, any other tensor at once."""
        if self.under_way:
            with torch.no_grad():
                c10d_functional.wait_tensor(tensor.detach())
        return tensor

    def finish(self) -> None:
        """Wait for all gathered copies that are still under way, also for those that no graph has read."""
        for gathered_copy in self.under_way:
            self.arrived(gathered_copy)
        self.under_way = []


def new_copy(entry: ParameterState) -> Tensor:
    """Return an empty full parameter, `[*shape]` in the dtype that the forward sees.

    Its memory has room for equally many rows of each rank, so that it can be gathered in place.
    """
    spec, shard = entry.spec, entry.rows
    dtype, _ = spec.dtypes(shard.dtype)
    rows, *rest = spec.shape
    world = resolve_group(spec.group).size()
    gathered_copy = torch.empty((chunk_rows(rows, world) * world, *rest), dtype=dtype, device=shard.device)
    gathered_copy[rows:].zero_()
    gathered_copy.resize_(spec.shape)  # which leaves the memory as it is
    return gathered_copy


def gather_now(
    entries: Sequence[ParameterState], operations: ModelOperations, *, outside: bool | None = False
) -> dict[ParameterState, Tensor]:
    """Return full parameters. Those without a gathered copy are gathered together; on one rank they are the shards.

    Args:
        entries: The parameters, in the same order on all ranks.
        operations: Those of their model.
        outside: See `ModelOperations.gathering`.
    """
    with torch.inference_mode(False), torch.no_grad():
        missing = [entry for entry in entries if entry.spec.group and entry.gathered_copy is None]
        for entry in missing:
            for transform in entry.transforms:
                transform.before_eager_gather()
        copies: dict[ParameterState, Tensor] = {}
        if missing:
            with operations.gathering(named("parameter", missing), outside=outside):
                copies = {entry: new_copy(entry) for entry in missing if Ranks.of(entry.spec.group).size > 1}
                start_gathers(tuple(copies.items()))
                copies = {entry: c10d_functional.wait_tensor(each) for entry, each in copies.items()}
        return copies | {entry: _known(entry) for entry in entries if entry not in copies}


def _known(entry: ParameterState) -> Tensor:
    dtype, _ = entry.spec.dtypes(entry.param.dtype)
    return entry.rows.to(dtype) if entry.gathered_copy is None else entry.gathered_copy


def named(what: str, entries: Sequence[ParameterState]) -> str:
    """Return the name of a parameter, or of the first of several: "parameter 'a' and 2 more"."""
    return f"{what} {entries[0].name!r}" + (f" and {len(entries) - 1} more" if len(entries) > 1 else "")


def start_gathers(pairs: Sequence[tuple[ParameterState, Tensor]]) -> None:
    """Start to gather parameters into these copies, in the given order within each process group."""
    gathered_copies = tuple(gathered_copy for _, gathered_copy in pairs)
    # Tensors that autograd saved from a gathered copy stay valid if the copy is only gathered once more.
    with torch.no_grad(), keeping_version(gathered_copies):
        by_group: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for entry, gathered_copy in pairs:
            whole, own = _whole_and_own(entry, gathered_copy)
            own[: entry.rows.shape[0]].copy_(entry.rows)  # so that the shard may be written to while they travel
            by_group.setdefault(entry.spec.group, []).append((own, whole))
        for group, pieces in by_group.items():
            start_gathers_in_place(pieces, Ranks.of(group))


def were_written(entries: list[ParameterState]) -> bool:
    """Return True if the shards of any rank differ from what gathered copies were fetched from.

    This detects writes to `.data`, which leave no other trace. All ranks call it together: it sends one number, and the
    host waits for it once.
    """
    found = torch.stack([_differs(entry) for entry in entries]).any().float()
    groups = dict.fromkeys(entry.spec.group for entry in entries)
    return bool(sum_over(found, [Ranks.of(group) for group in groups]))


def _differs(entry: ParameterState) -> Tensor:
    """Return whether a shard differs from this rank's rows of its gathered copy, as a bool on its device."""
    _, own = _whole_and_own(entry, _copy_of(entry))
    shard = entry.rows.detach().to(own.dtype)
    if shard.device.type == "cpu":  # on a GPU the host would wait for each answer
        return torch.tensor(not torch.equal(own[: shard.shape[0]], shard))
    return (own[: shard.shape[0]] != shard).any()


def _whole_and_own(entry: ParameterState, gathered_copy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the memory of a gathered copy with equally many rows of each rank, and this rank's rows of it."""
    spec, group = entry.spec, resolve_group(entry.spec.group)
    rows = chunk_rows(spec.shape[0], group.size())
    whole = gathered_copy.detach().as_strided((rows * group.size(), *spec.shape[1:]), gathered_copy.stride())
    return whole, whole[group.rank() * rows :][:rows]


def _copy_of(entry: ParameterState) -> Tensor:
    assert entry.gathered_copy is not None
    return entry.gathered_copy

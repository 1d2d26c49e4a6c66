"""Bytes that a rank sends: a graph's collectives, and what a partitioned model communicates outside its graphs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import resolve_group, size_hint
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import PartitionState
from dsgraph.passes import MeshAxis, PassError
from dsgraph.passes.analysis.cost import sent_bytes
from dsgraph.passes.analysis.sizes import Size, hint, size_hints
from dsgraph.passes.ir.collectives import TABLE, collective_group, collective_kind, collectives
from dsgraph.passes.ir.parameters import shard_axis


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one group.

    Attributes:
        kind: The op, without its namespace.
        axis: The mesh axis, or the name of a group outside the mesh.
        count: How many.
        sent_bytes: What each rank sends for all of them; None where that is not known.
    """

    kind: str
    axis: str
    count: int
    sent_bytes: int | None


def nbytes(value: object) -> int | None:
    """Return the bytes of a tensor, or of all tensors of a list.

    Dynamic sizes count as they are in the batch at hand.
    """
    if isinstance(value, (list, tuple)):
        parts = [nbytes(item) for item in value]
        return None if None in parts else sum(part for part in parts if part is not None)
    if not isinstance(value, Tensor):
        return 0
    sizes = [size_hint(size) for size in value.shape]
    if None in sizes:
        return None
    return math.prod(size for size in sizes if size is not None) * value.element_size()


def graph_traffic(gm: GraphModule, axes: Iterable[MeshAxis]) -> tuple[Traffic, ...]:
    """Return what a lowered graph sends each time it runs, by kind and axis, in the order of first use."""
    by_group = {axis.group: axis for axis in axes}
    found = []
    for node in collectives(gm):
        group = collective_group(node)
        axis = by_group.get(group)
        size = axis.size if axis is not None else resolve_group(group).size()
        sent = sent_bytes(node, size)
        amount = None if sent is None else _known(node, sent)
        found.append(Traffic(collective_kind(node), axis.name if axis is not None else group, 1, amount))
    return add_up(found)


def _known(node: Node, size: Size) -> int | None:
    """Return the number for a size; None if it depends on the data."""
    try:
        return hint(size, size_hints([value.meta.get("val") for value in (node, *node.all_input_nodes)]))
    except PassError:
        return None


def refresh_traffic(state: PartitionState) -> tuple[Traffic, ...]:
    """Return the traffic of refreshing all gathered copies of stages 1 and 2, once after each optimizer step."""
    return _gathers(state, state.copied())


def held_once(states: Sequence[PartitionState]) -> set[ParameterState]:
    """Return the parameters that stage 3 gathers once for all micro-batches of a step under `accumulate`."""
    return {entry for state in states for entry in state.step.holds()}


def held_traffic(states: Sequence[PartitionState]) -> tuple[Traffic, ...]:
    """Return the traffic of gathering them."""
    held = held_once(states)
    return add_up(item for state in states for item in _gathers(state, held.intersection(state.parameters)))


def _gathers(state: PartitionState, entries: Iterable[ParameterState]) -> tuple[Traffic, ...]:
    axis = shard_axis(state.axes)
    if axis is None:
        return ()
    amounts = [entry.copy_bytes // axis.size * (axis.size - 1) for entry in entries]
    return add_up(Traffic("refresh of gathered copies", axis.name, 1, amount) for amount in amounts)


def accumulated_traffic(state: PartitionState) -> tuple[Traffic, ...]:
    """Return the traffic of reducing local gradients at the end of an accumulated step."""
    trained = [entry for entry in state.parameters if entry.param.requires_grad]
    if not state.reduces_once or not trained:
        return ()
    names = {axis.group: axis for axis in state.axes}
    # Which parameters were used at all: one int32 each.
    found = [_reduced(axis, "all_reduce", 4 * len(trained)) for axis in state.axes]
    whole: dict[tuple[str, torch.dtype, torch.dtype], int] = {}  # replicated parameters are reduced together
    for entry in trained:
        dtypes = entry.spec.dtypes(entry.param.dtype)
        if entry.spec.group:
            axis = names[entry.spec.group]
            rows = entry.bytes_of_rank(dtypes[1])
            found.append(_reduced(axis, "reduce_scatter_tensor", rows))
            found += [_reduced(names[group], "all_reduce", rows) for group in entry.spec.outer_groups]
            continue
        for group in entry.spec.outer_groups:
            key = (group, *dtypes)
            whole[key] = whole.get(key, 0) + entry.param.numel() * dtypes[1].itemsize
    found += [_reduced(names[group], "all_reduce", amount) for (group, *_), amount in whole.items()]
    return add_up(found)


def add_up(traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Merge the entries of each kind and axis."""
    totals: dict[tuple[str, str], Traffic] = {}
    for item in traffic:
        key = (item.kind, item.axis)
        old = totals.get(key, Traffic(item.kind, item.axis, 0, 0))
        known = old.sent_bytes is not None and item.sent_bytes is not None
        amount = (old.sent_bytes or 0) + (item.sent_bytes or 0) if known else None
        totals[key] = Traffic(item.kind, item.axis, old.count + item.count, amount)
    return tuple(totals.values())


def total(traffic: Iterable[Traffic]) -> int | None:
    """Return the sum of all bytes; None if some are unknown."""
    amounts = [item.sent_bytes for item in traffic]
    return None if None in amounts else sum(amount for amount in amounts if amount is not None)


def _reduced(axis: MeshAxis, kind: str, counted: int) -> Traffic:
    return Traffic(kind, axis.name, 1, TABLE.by_kind[kind].sent_bytes(counted, axis.size))

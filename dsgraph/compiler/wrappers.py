"""Wrappers around each call of a compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsgraph.partitioning.accumulation.read_leaves import read_leaves
from dsgraph.partitioning.accumulation.watched_graphs import watch_sums
from dsgraph.partitioning.eager.full_tensor import FullTensor
from dsgraph.partitioning.eager.replaced_data import refuse_replaced_data
from dsgraph.partitioning.state import PartitionState, partition_states
from dsgraph.passes import AxisRole, InputRole
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.equal_batches import EqualBatches, random_state

from .capture import partitioned_mesh
from .memory_limit.compile_ahead import stop_if_only_compiled
from .memory_limit.limit_watch import watch_limit
from .request import CompileRequest, GraphCompiler
from .runs import compare_runs

Compiled = Callable[..., Any]


def refresh_copies(compiled: Compiled, request: CompileRequest, compiler: GraphCompiler) -> Compiled:
    """Return `compiled`, preceded by a refresh of the gathered copies that it reads, if it reads any."""
    numbers = tuple(partitions_among(request.inputs).values())
    if not numbers:
        return compiled
    await_them = not compiler.awaits_copies

    def run(*args: Any) -> Any:
        partitions: list[PartitionState] = [args[number].dsgraph_partition for number in numbers]
        for partition in partitions:
            partition.refresh()
            if await_them:
                partition.copies.finish()
        outputs = compiled(*args)
        if torch.is_grad_enabled():
            _note_gradients(outputs, partitions)
        return outputs

    return run


def hand_out_leaves(compiled: Compiled, request: CompileRequest, _: GraphCompiler) -> Compiled:
    """Return `compiled`, called with leaves that are parts of the graph of their parameters, if it reads any."""
    numbers = [number for number, value in enumerate(request.inputs) if hasattr(value, "dsgraph_leaf")]
    if not numbers:
        return compiled

    def run(*args: Any) -> Any:
        given = list(args)
        for number, leaf in zip(numbers, read_leaves([args[number] for number in numbers]), strict=True):
            given[number] = leaf
        return compiled(*given)

    return run


def compare_ranks(compiled: Compiled, request: CompileRequest, _: GraphCompiler) -> Compiled:
    """Return `compiled` with a comparison of each run between ranks, before its collectives."""
    mesh = partitioned_mesh(request.inputs, request.facts, request.module)
    if mesh is None:
        return compiled
    states = partition_states(request.module) if request.module is not None else []
    return compare_runs(compiled, request.communication, mesh, request.facts.axes, states)


def watch_added_sums(compiled: Compiled, request: CompileRequest, _: GraphCompiler) -> Compiled:
    """Return `compiled` with a watch on the accumulated gradients that its backward adds, if it adds any."""
    return watch_sums(compiled, request.sums)


def read_full_tensors(compiled: Compiled, request: CompileRequest, _: GraphCompiler) -> Compiled:
    """Return `compiled`, called with plain tensors in place of the full parameters that a function was given."""
    numbers = [number for number, value in enumerate(request.inputs) if isinstance(value, FullTensor)]
    if not numbers:
        return compiled

    def run(*args: Any) -> Any:
        plain = list(args)
        for number in numbers:
            plain[number] = args[number].read()
        return compiled(*plain)

    return run


def refuse_replaced(compiled: Compiled, request: CompileRequest, _: GraphCompiler) -> Compiled:
    """Return `compiled` with a check of its parameters' memory before it runs."""
    names = {number: info.name for number, info in request.facts.params.items()}
    if not names:
        return compiled

    def run(*args: Any) -> Any:
        for number, name in names.items():
            refuse_replaced_data(args[number], name)
        return compiled(*args)

    return run


def compare_batches(compiled: Compiled, request: CompileRequest, _: GraphCompiler) -> Compiled:
    """Return `compiled` with a comparison of batches and random numbers between tensor-parallel ranks, in first calls.

    Integers and booleans are compared, and in training also floats that need no gradient. Ranks may hold different
    slices of other inputs.
    """
    group = next((axis.group for axis in request.facts.axes if axis.role is AxisRole.TENSOR), None)
    if group is None or any(axis.backend == "fake" for axis in request.facts.axes):
        return compiled
    device = torch.device(request.facts.device_type)
    equal, numbers = EqualBatches(None, Agreement.of(group, device.type)), _batch_inputs(request)

    def run(*args: Any) -> Any:
        if not equal.is_due(request.number):
            return compiled(*args)
        given = {request.input_names[number]: args[number] for number in numbers}
        equal.compare(request.communication.place, given)
        before = random_state(device)
        outputs = compiled(*args)
        if not torch.equal(before, random_state(device)):
            equal.compare_random_numbers(device, before)
        return outputs

    return run


def _batch_inputs(request: CompileRequest) -> list[int]:
    kinds = {torch.int64, torch.int32, torch.bool}
    if request.trains:
        kinds |= {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    return [
        number
        for number, item in request.facts.roles.items()
        if item.role is InputRole.DATA
        and isinstance(value := request.inputs[number], Tensor)
        and value.dtype in kinds
        and not value.requires_grad
    ]


WRAPPERS: tuple[Callable[[Compiled, CompileRequest, GraphCompiler], Compiled], ...] = (
    hand_out_leaves,
    compare_ranks,
    refresh_copies,
    watch_added_sums,
    read_full_tensors,
    refuse_replaced,
    compare_batches,
    watch_limit,
    stop_if_only_compiled,
)
"""Applied in this order: the last is outermost."""


def partitions_among(inputs: Sequence[Any]) -> dict[PartitionState, int]:
    """Return the partitions whose gathered copies are among the inputs, each with the number of one such input."""
    found: dict[PartitionState, int] = {}
    for number, value in enumerate(inputs):
        partition = getattr(value, "dsgraph_partition", None)
        if isinstance(partition, PartitionState):
            found.setdefault(partition, number)
    return found


def _note_gradients(outputs: Any, partitions: Sequence[PartitionState]) -> None:
    def note(_: Any) -> None:
        for partition in partitions:
            partition.note_gradient()

    for node in {out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None}:
        node.register_prehook(note)

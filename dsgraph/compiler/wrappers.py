"""What is done around each call of a compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsgraph.step.state import PartitionState
from dsgraph.step.watched_graphs import watch_sums

from .request import CompileRequest, GraphCompiler

Compiled = Callable[..., Any]


def refresh_replicas(compiled: Compiled, request: CompileRequest, compiler: GraphCompiler) -> Compiled:
    """`compiled`, preceded by a refresh of the replicas that it reads, if it reads any."""
    numbers = tuple(partitions_among(request.inputs).values())
    if not numbers:
        return compiled
    await_them = not compiler.awaits_replicas

    def run(*args: Any) -> Any:
        partitions: list[PartitionState] = [args[number].dsgraph_partition for number in numbers]
        for partition in partitions:
            partition.refresh()
            if await_them:
                partition.finish()
        outputs = compiled(*args)
        if torch.is_grad_enabled():
            _note_gradients(outputs, partitions)
        return outputs

    return run


def watch_added_sums(compiled: Compiled, request: CompileRequest, _: GraphCompiler) -> Compiled:
    """`compiled`, with an eye on the local sums that its backward adds, if it adds any."""
    return watch_sums(compiled, request.sums)


WRAPPERS: tuple[Callable[[Compiled, CompileRequest, GraphCompiler], Compiled], ...] = (
    refresh_replicas,
    watch_added_sums,
)
"""Applied in this order: the last is outermost."""


def partitions_among(inputs: Sequence[Any]) -> dict[PartitionState, int]:
    """The partitions of which inputs are replicas, each with the number of one such input."""
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

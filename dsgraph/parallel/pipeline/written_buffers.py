"""Buffers that a forward writes, such as running statistics. Each belongs to the one stage that computes with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dsgraph.passes.parallel.stages.write_copies import write_to_copy
from dsgraph.utils.errors import PartitionError

from .fake_values import FakeRun


@dataclass(frozen=True)
class Writes:
    """The writes of a captured forward.

    Attributes:
        values: Placeholder of a buffer -> the node whose value the buffer has after the forward.
        together: Nodes that one stage must have. For a buffer, by its name, the nodes that write it: other stages may
            receive the value that it has then. For an argument that is written to, all that read it.
    """

    values: Mapping[str, Node]
    together: Mapping[str, frozenset[Node]]


@contextmanager
def keeping_buffers(model: nn.Module, *, has_values: bool) -> Iterator[None]:
    """Undo what a run of a model's forward does to its buffers.

    Args:
        model: The model.
        has_values: False for a copy without values, of which only assignments are undone.
    """
    kept = [
        (module._buffers, key, buffer, buffer.detach().clone() if has_values else None)
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for buffers, key, buffer, value in kept:
            buffers[key] = buffer
            if value is not None and not torch.equal(buffer, value):
                buffer.detach().copy_(value)


def assigned_buffers(
    model: nn.Module, tensors: Sequence[tuple[str, Tensor]], *, results: Sequence[Any], arguments: Sequence[Any]
) -> dict[str, int]:
    """Return the buffers to which the forward assigned a value that its graph computed: name -> number of the result.

    Args:
        model: The model after the forward.
        tensors: Its parameters and buffers before.
        results: What its graph returned.
        arguments: The leaves of its arguments.

    Raises:
        PartitionError: An argument was assigned to a buffer.
    """
    before, numbers = dict(tensors), {id(value): number for number, value in enumerate(results)}
    found = {}
    for name, buffer in model.named_buffers():
        if buffer is before.get(name):
            continue
        if any(buffer is argument for argument in arguments):
            raise PartitionError(
                f"pipeline: the forward assigns an argument to buffer {name!r}: copy it into the buffer with copy_()"
            )
        if id(buffer) in numbers and name in before:
            found[name] = numbers[id(buffer)]
    return found


def find_writes(
    gm: GraphModule,
    run: FakeRun,
    state: dict[str, tuple[str, Tensor]],
    *,
    assigned: Mapping[str, Tensor],
    numbers: Mapping[str, int],
) -> Writes:
    """Find what a captured forward writes to, and let it write to copies of buffers, in place.

    A stage passes the current value of such a buffer to its graph, and stores the value that the graph returns. So a
    backward that runs after the forwards of later micro-batches reads the values of its own one, recomputation writes
    nothing, and a later stage can receive the value.

    Args:
        gm: The captured graph.
        run: Its run under fake tensors.
        state: Placeholder of a parameter or buffer -> its name and itself. Assigned buffers that the forward does not
            read are added.
        assigned: Buffers to which the forward assigns a value, by name.
        numbers: The result of the graph that each of them gets.

    Raises:
        PartitionError: The forward writes to a parameter, or a buffer gets a value of another shape or with a gradient.
    """
    values: dict[str, Node] = {}
    together: dict[str, frozenset[Node]] = {}
    results: Any = gm.graph.output_node().args[0]
    news = {name: results[number] for name, number in numbers.items()}
    for name in sorted(news.keys() - {name for name, _ in state.values()}):
        placeholder = _placeholder(gm, assigned[name])
        state[placeholder.name] = (name, assigned[name])
    for node in gm.graph.find_nodes(op="placeholder"):
        name, tensor = state.get(node.name, (node.name, None))
        writers = run.writers(node)
        if not writers and name not in news:
            continue
        if isinstance(tensor, nn.Parameter):
            raise PartitionError(
                f"pipeline: the forward writes to parameter {name!r}, of which stages hold copies and shards: change "
                "parameters after the step"
            )
        if tensor is None:  # each stage that reads an argument has its own
            together[name] = frozenset(user for each in run.sharing(node) for user in each.users)
            continue
        copies = [write_to_copy(gm.graph, node)] if node.users else []  # none if it is assigned and not read
        value = news[name] if name in news else copies[0]
        _check_value(name, value, tensor)
        values[node.name], together[name] = value, frozenset({*writers, *copies, value})
    return Writes(values, together)


def _placeholder(gm: GraphModule, buffer: Tensor) -> Node:
    last = gm.graph.find_nodes(op="placeholder")[-1]
    with gm.graph.inserting_after(last):
        node = gm.graph.placeholder("assigned_buffer")
    node.meta["val"] = torch.empty_like(buffer, device="meta")
    return node


def _check_value(name: str, value: Node, buffer: Tensor) -> None:
    found = value.meta["val"]
    if found.shape != buffer.shape or found.dtype != buffer.dtype:
        raise PartitionError(
            f"pipeline: the forward assigns {found.dtype} of shape {tuple(found.shape)} to buffer {name!r}, which is "
            f"{buffer.dtype} of shape {tuple(buffer.shape)}: keep shape and dtype"
        )
    if found.requires_grad:
        raise PartitionError(
            f"pipeline: the forward gives buffer {name!r} a value with a gradient, which would reach back to earlier "
            "micro-batches: detach() it"
        )

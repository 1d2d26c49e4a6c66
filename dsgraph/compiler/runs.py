"""Comparison of a compiled graph between ranks: of its communication, and of each run before its collectives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh
from torch.fx import GraphModule, Node

from dsgraph.compat.autograd import compiled_backwards
from dsgraph.partitioning.state import PartitionState
from dsgraph.passes import AxisRole, CaptureFacts, MeshAxis
from dsgraph.passes.core.collective_order import name_on_all_ranks, shape_on_all_ranks
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.graph import all_graph_modules, bound_arguments, is_gather_marker, placeholders
from dsgraph.passes.parallel.slice_walk import marked_slices
from dsgraph.ranks.eager_agreement import eager_agreements
from dsgraph.ranks.mesh import mesh_ranks, ranks_along
from dsgraph.ranks.rank_notes import Intent

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Communication:
    """The communication of a graph, which ranks compare before it runs.

    Attributes:
        parameters: Numbers of the inputs that are parameters, each with the parameter's full name.
        in_forward: True if the forward communicates.
        in_backward: True if a backward does.
        gathers: True if the forward gathers rows of parameters.
        place: Where the graph comes from: "Net.forward (net.py)".
    """

    parameters: tuple[tuple[int, str], ...] = ()
    in_forward: bool = False
    in_backward: bool = False
    gathers: bool = False
    place: str = ""

    @staticmethod
    def of(gm: GraphModule, names: dict[int, str], *, place: str, training: bool) -> Communication:
        """Return the communication of a captured graph.

        Args:
            gm: The graph, with its markers.
            names: Input number -> full name of each parameter.
            place: Where the graph comes from.
            training: True if a backward may follow that reduces gradients.
        """
        nodes = [node for module in all_graph_modules(gm) for node in module.graph.nodes]
        markers = [node for node in nodes if is_gather_marker(node)]
        gathers = any(node.kwargs["group"] and node.args[1] is None for node in markers)
        own = any(is_collective(node) for node in nodes) or any(marked_slices(gm))
        return Communication(
            parameters=tuple(names.items()),
            in_forward=gathers or own,
            in_backward=training and bool(markers or own),
            gathers=gathers,
            place=place,
        )

    def names(self, args: Sequence[Any]) -> tuple[str, ...]:
        """Return the full names of the parameters of one call; equal modules may share a graph."""
        return tuple(getattr(args[number], "dsgraph_name", name) for number, name in self.parameters)


def compare_runs(
    compiled: Compiled,
    communication: Communication,
    mesh: DeviceMesh,
    axes: Sequence[MeshAxis],
    states: Sequence[PartitionState],
) -> Compiled:
    """Return `compiled` with a comparison of each run between ranks, before its collectives.

    Args:
        compiled: A compiled graph, called with the graph's inputs.
        communication: The communication of the graph.
        mesh: Mesh of its parameters.
        axes: The axes of this mesh over which the graph communicates.
        states: The partitioned models whose parameters it reads.
    """
    if not communication.in_forward and not communication.in_backward:
        return compiled
    roles = {AxisRole.TENSOR} | ({AxisRole.SHARD} if communication.gathers else set())
    of_forward = ranks_along(mesh, {axis.group for axis in axes if axis.role in roles})
    of_mesh = tuple(sorted(mesh_ranks(mesh)))
    weak_states = [weakref.ref(state) for state in states]

    def intent(does: str, names: Sequence[str]) -> Intent:
        steps = sum(state.operations.updates for weak in weak_states if (state := weak()) is not None)
        return Intent.of_graph(does, names, place=communication.place, step=steps)

    def run(*args: Any) -> Any:
        trains = communication.in_backward and torch.is_grad_enabled()
        names = communication.names(args)
        forward: AbstractContextManager[None] = nullcontext()
        if communication.in_forward:
            agreement = eager_agreements.over(mesh, of_mesh if trains else of_forward)
            does = "runs the compiled forward" + " without gradients" * (not torch.is_grad_enabled())
            forward = agreement.on(intent(does, names))
        with forward:
            outputs = compiled(*args)
        if trains:
            for node in compiled_backwards(outputs):
                node.register_prehook(lambda _: before_backward(names))
        return outputs

    def before_backward(names: Sequence[str]) -> None:
        agreement = eager_agreements.over(mesh, of_mesh)
        if agreement.patience:
            # Always wait: a collective that fails inside a backward cannot be caught here.
            agreement.confirm(intent("runs the compiled backward", names), waits=True)

    return run


def communication_lines(
    gm: GraphModule, facts: CaptureFacts, parameters: Mapping[int, str], *, training: bool
) -> list[str]:
    """Return one line for each marker and each of the user's own collectives, and one for each parameter.

    The lines are in program order, and equal on all ranks.

    Args:
        gm: The captured graph.
        facts: Its facts.
        parameters: Input number -> full name.
        training: True if gradients are reduced.
    """
    names = {axis.group: axis.name for axis in facts.axes}
    numbers = {node: number for number, node in enumerate(placeholders(gm))}
    lines = [f"training={training}"]
    for module in all_graph_modules(gm):
        for node in module.graph.nodes:
            if is_gather_marker(node):
                (shard,) = node.args[0].all_input_nodes or [node.args[0]]
                whose = parameters.get(numbers.get(shard, -1), "")
                lines.append(_describe_marker(node, names) + f", of {whose!r}" * bool(whose))
            elif is_collective(node):
                call = bound_arguments(node)
                group = name_on_all_ranks(call.get("group_name", ""), names)
                lines.append(f"{node.target} {_shape(node)} over {group}")
    return [*lines, *(f"reads {name!r}" for name in parameters.values())]


def _describe_marker(node: Node, axis_names: dict[str, str]) -> str:
    _, gathered_copy, shape, *_ = node.args
    call: dict[str, Any] = dict(node.kwargs)
    axis = axis_names.get(call["group"]) or "nothing"
    outer = [axis_names.get(group, group) for group in call["outer_groups"]]
    kept = "" if gathered_copy is None else ", gathered copy kept"
    added = ", with an accumulated gradient" if call.get("adds_sum") else ""
    reduction = f", gradient reduced by {call['reduction']}" if "reduction" in call else ""
    return (
        f"gather_param {shape} {call['dtype']} over {axis}, gradient in {call['reduce_dtype']} over {outer} besides"
        f"{added}{reduction}{kept}"
    )


def _shape(node: Node) -> str:
    """Return the shape of what a collective is given."""
    given = node.all_input_nodes[0]
    value = given.meta.get("val", given.meta.get("example_value"))
    return shape_on_all_ranks(node, value) if isinstance(value, torch.Tensor) else ""

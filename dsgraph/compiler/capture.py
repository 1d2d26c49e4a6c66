"""What can be read off a captured graph: its parameters, the mesh they lie on, and what it will communicate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.fx import GraphModule, Node

from dsgraph import compat
from dsgraph.passes import CaptureFacts, MeshAxis, ParamInfo
from dsgraph.passes.compat import is_to_local
from dsgraph.passes.ir.graph import all_graph_modules, bound_arguments, is_collective, is_gather_marker, placeholders
from dsgraph.passes.ir.sources import OWN_FOLDER
from dsgraph.sharding.mesh import mesh_axes


def read_facts(gm: GraphModule, inputs: Sequence[Any]) -> CaptureFacts:
    """The facts that passes may use, from the markers in a captured graph and its inputs."""
    groups = _marker_groups(gm)
    axes: dict[str, MeshAxis] = {}
    params: dict[int, ParamInfo] = {}
    for number, (node, value) in enumerate(zip(placeholders(gm), inputs, strict=True)):
        if not isinstance(value, DTensor):
            continue
        found = [axis for axis in mesh_axes(value.device_mesh) if axis.group in groups]
        if not found:
            continue  # somebody else's DTensor
        axes.update({axis.group: axis for axis in found})
        split = any(isinstance(placement, Shard) for placement in value.placements)
        params[number] = ParamInfo(
            name=parameter_name(compat.source_name(node)) or node.name,
            shape=tuple(value.shape),
            shard_shape=_shard_shape(value),
            dtype=value.dtype,
            placement="shard" if split else "whole",
            requires_grad=value.requires_grad,
        )
    return CaptureFacts(
        axes=tuple(axes.values()),
        params=MappingProxyType(params),
        replicas=frozenset(number for number, value in enumerate(inputs) if hasattr(value, "dsgraph_partition")),
        device_type=_device_type(inputs),
    )


def _device_type(inputs: Sequence[Any]) -> str:
    """The accelerator that the graph computes on, if any of its inputs lies on one."""
    kinds = (value.device.type for value in inputs if isinstance(value, torch.Tensor))
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def _shard_shape(value: DTensor) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(value.to_local().shape)


def partitioned_mesh(inputs: Sequence[Any], facts: CaptureFacts) -> DeviceMesh | None:
    """The mesh of the graph's partitioned parameters; None when it has none."""
    for number in facts.params:
        mesh: DeviceMesh = inputs[number].device_mesh
        return mesh
    return None


def communication_lines(gm: GraphModule, facts: CaptureFacts, *, training: bool) -> list[str]:
    """One line for each marker and each of the user's own collectives, in program order, equal on all ranks."""
    names = {axis.group: axis.name for axis in facts.axes}
    lines = [f"training={training}"]
    for module in all_graph_modules(gm):
        for node in module.graph.nodes:
            if is_gather_marker(node):
                lines.append(_describe_marker(node, names))
            elif is_collective(node):
                call = bound_arguments(node)
                lines.append(f"{node.target} {_shape(node.all_input_nodes[0])} over {call.get('group_name')}")
    return lines


def parameter_name(source: str) -> str:
    """`L['self']._modules['block']._parameters['weight']` -> `block.weight`; empty when it is no parameter's source."""
    if not re.search(r"_parameters\['[^']*'\]$", source):
        return ""
    return ".".join(re.findall(r"_(?:modules|parameters)\['([^']*)'\]", source))


def _marker_groups(gm: GraphModule) -> set[str]:
    groups: set[str] = set()
    for module in all_graph_modules(gm):
        for node in module.graph.nodes:
            if is_gather_marker(node):
                groups.add(node.kwargs["group"])
                groups.update(node.kwargs["outer_groups"])
    return groups - {""}


def _describe_marker(node: Node, axis_names: dict[str, str]) -> str:
    _, replica, shape, *_ = node.args
    call: dict[str, Any] = dict(node.kwargs)
    axis = axis_names.get(call["group"]) or "nothing"
    outer = [axis_names.get(group, group) for group in call["outer_groups"]]
    kept = "" if replica is None else ", replica kept"
    added = ", with a local sum" if call.get("adds_sum") else ""
    return (
        f"gather_param {shape} {call['dtype']} over {axis}, gradient in {call['reduce_dtype']} over {outer} besides"
        f"{added}{kept}"
    )


def _shape(node: Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else ""


def normalize_markers(gm: GraphModule) -> None:
    """Writes markers alike, whatever torch captured them, and prints them under the user's line.

    The shard is read by a plain `to_local()`, which caches can hold; dsgraph's own frames come off stack traces.
    """
    for module in all_graph_modules(gm):
        for node in [node for node in module.graph.nodes if is_gather_marker(node)]:
            shard = node.args[0]
            if is_to_local(shard) and shard.op != "call_method":
                shard.op, shard.target = "call_method", "to_local"
            for part in (shard, node):
                frames = re.split(r"(?m)^(?=  File )", part.stack_trace or "")
                part.stack_trace = "".join(frame for frame in frames if OWN_FOLDER not in frame)
        module.recompile()

"""Facts of a captured graph: its parameters, their mesh, and the communication of the graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.fx import GraphModule, Node

from dsgraph.compat.dynamo import source_name
from dsgraph.inductor_ext import backend_name
from dsgraph.partitioning.additions import added_since
from dsgraph.partitioning.parameter import ParameterState, not_taken_in
from dsgraph.partitioning.state import PartitionState, partition_states
from dsgraph.partitioning.transforms.offloaded import state_share
from dsgraph.passes import AxisRole, CaptureFacts, GraphInput, InputRole, MeshAxis, ParameterSpec
from dsgraph.passes.compat import is_to_local
from dsgraph.passes.core.collective_order import name_on_all_ranks
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.graph import all_graph_modules, bound_arguments, is_gather_marker, placeholders
from dsgraph.passes.ir.user_source import OWN_FOLDER
from dsgraph.passes.parallel.slice_walk import communicates_slices, marked_slices
from dsgraph.ranks.mesh import axis_group, mesh_axes
from dsgraph.utils.errors import PartitionError


def read_facts(gm: GraphModule, inputs: Sequence[Any], module: nn.Module | None = None) -> CaptureFacts:
    """Return the facts that passes may use, from the markers in a captured graph and its inputs.

    Args:
        gm: The captured graph.
        inputs: Its inputs.
        module: The module that is being called; parameters have their names in it.
    """
    groups = _marker_groups(gm)
    sliced = _sliced_inputs(gm)
    axes: dict[str, MeshAxis] = {}
    params: dict[int, ParameterSpec] = {}
    roles = input_roles(gm, inputs, module)
    known: dict[int, tuple[ParameterState, dict[str, Any]]] = {}
    for state in _states(inputs, module):
        tier = _state_tier(state, device_type=_device_type(inputs))
        known |= {id(entry.param): (entry, tier) for entry in state.parameters}
    for entry, _ in known.values():
        for transform in entry.transforms:
            transform.attach(entry.param)
    for number, value in enumerate(inputs):
        if not isinstance(value, DTensor):
            continue
        if number in sliced:
            roles[number] = replace(roles[number], slice_group=sliced[number])
            axes[sliced[number]] = _tensor_axis(value.device_mesh, sliced[number])
        found = [axis for axis in mesh_axes(value.device_mesh) if axis.group in groups]
        if not found:
            continue  # somebody else's DTensor
        axes.update({axis.group: axis for axis in found})
        name = roles[number].parameter
        if id(value) in known:
            entry, tier = known[id(value)]
            params[number] = replace(entry.current_spec(name), **tier)
        else:
            params[number] = parameter_spec(value, name)
    copies = (number for number, item in roles.items() if item.role is InputRole.GATHERED_COPY)
    return CaptureFacts(
        axes=tuple(axes.values()),
        params=MappingProxyType(params),
        roles=MappingProxyType(roles),
        gathered_copies=frozenset(copies),
        device_type=_device_type(inputs),
        is_sliced=communicates_slices(gm),
    )


def _sliced_inputs(gm: GraphModule) -> dict[int, str]:
    """Return input number -> group of the ranks over which a parameter is sliced, for tensor-parallel parameters."""
    numbers = {node: number for number, node in enumerate(placeholders(gm))}
    found: dict[int, str] = {}
    for node, _, _, group in marked_slices(gm):
        while node not in numbers and node.all_input_nodes:
            node = node.all_input_nodes[0]
        if node in numbers:
            found[numbers[node]] = group
    return found


def _tensor_axis(mesh: DeviceMesh, group: str) -> MeshAxis:
    """Return the axis of a mesh over which operators are tensor-parallel."""
    dim = next(dim for dim in range(mesh.ndim) if axis_group(mesh, dim).group_name == group)
    name = (mesh.mesh_dim_names or ("tensor",) * mesh.ndim)[dim]
    own = axis_group(mesh, dim)
    return MeshAxis(name, mesh.size(dim), group, backend_name(own, mesh.device_type), AxisRole.TENSOR)


def parameter_spec(param: DTensor, name: str) -> ParameterSpec:
    """Return what passes see of a parameter that no `ParameterState` describes, such as one of `functional_call`."""
    axes = zip(mesh_axes(param.device_mesh), param.placements, strict=True)
    group = next((axis.group for axis, placement in axes if isinstance(placement, Shard)), "")
    shape = tuple(param.shape)
    return ParameterSpec(name, shape, _shard_shape(param), param.dtype, group, param.requires_grad)


def _state_tier(state: PartitionState, *, device_type: str) -> dict[str, Any]:
    """Return the tier of the optimizer's state: on the CPU, host memory is the device's memory."""
    tier = state.arguments.offload.optimizer
    if tier == "disk" or (tier and device_type != "cpu"):
        return {"state_tier": tier, "state_share": state_share(state)}
    return {}


def input_roles(gm: GraphModule, inputs: Sequence[Any], module: nn.Module | None) -> dict[int, GraphInput]:
    """Return the role of each input of a captured graph, by its identity: the table entry that holds it.

    A parameter gets its name in `module`, so that equal layers have equal names in equal graphs; outside the module,
    the name in the table. Dynamo's source is used only for other parameters: those of `functional_call`, and of
    functions that no module calls.
    """
    names = {id(param): name for name, param in module.named_parameters()} if module is not None else {}
    known: dict[int, GraphInput] = {}
    for entry in (entry for state in _states(inputs, module) for entry in state.parameters):
        name = names.get(id(entry.param), entry.name)
        for role, tensor in _tensors_of(entry):
            known.setdefault(id(tensor), GraphInput(role, name))
    buffers = {id(buffer) for buffer in module.buffers()} if module is not None else set()
    found: dict[int, GraphInput] = {}
    for number, (node, value) in enumerate(zip(placeholders(gm), inputs, strict=True)):
        if id(value) in known:
            found[number] = known[id(value)]
        elif isinstance(value, (nn.Parameter, DTensor)):
            name = names.get(id(value)) or parameter_name(source_name(node)) or node.name
            found[number] = GraphInput(InputRole.SHARD, name)
        else:
            found[number] = GraphInput(InputRole.BUFFER if id(value) in buffers else InputRole.DATA)
    return found


def refuse_added_parameters(inputs: Sequence[Any], module: nn.Module | None) -> None:
    """Refuse to train a partitioned model to which parameters were added since.

    Raises:
        PartitionError: Names the first one.
    """
    for state in _states(inputs, module) if torch.is_grad_enabled() else ():
        name = added_since(state)
        if name is not None:
            raise PartitionError(not_taken_in(name))


def _states(inputs: Sequence[Any], module: nn.Module | None) -> list[PartitionState]:
    """Return the partitioned models that a graph can read."""
    states = partition_states(module) if module is not None else []
    for value in inputs:
        sum_of = getattr(value, "dsgraph_sum_of", None)
        of = sum_of[1] if sum_of is not None else getattr(value, "dsgraph_partition", None)
        if of is not None and of not in states:
            states.append(of)
    return states


def _tensors_of(entry: ParameterState) -> Iterator[tuple[InputRole, Tensor]]:
    """Yield the tensors of a parameter that a graph may read, with their roles."""
    yield InputRole.SHARD, entry.param
    for copy in (entry.gathered_copy, entry.block_copy):
        if copy is not None:
            yield InputRole.GATHERED_COPY, copy
    if entry.block_read is not None:
        yield InputRole.GATHERED_COPY if entry.spec.group else InputRole.SHARD, entry.block_read
    if entry.leaf is not None:  # the copy itself, or, of a parameter that is not split, an alias of the shard
        yield InputRole.SHARD, entry.leaf
    if entry.accumulated_grad is not None:
        yield InputRole.ACCUMULATED_GRADIENT, entry.accumulated_grad
    for tensor in (tensor for transform in entry.transforms for tensor in transform.inputs):
        yield InputRole.OPTIMIZER_STATE, tensor


def _device_type(inputs: Sequence[Any]) -> str:
    """Return the accelerator of the graph, if any of its inputs is on one."""
    kinds = (value.device.type for value in inputs if isinstance(value, torch.Tensor))
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def _shard_shape(value: DTensor) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(value.to_local().shape)


def partitioned_mesh(inputs: Sequence[Any], facts: CaptureFacts) -> DeviceMesh | None:
    """Return the mesh of the graph's partitioned or tensor-parallel parameters; None if it has neither."""
    for number in (*facts.params, *_sliced_numbers(facts)):
        mesh: DeviceMesh = inputs[number].device_mesh
        return mesh
    return None


def _sliced_numbers(facts: CaptureFacts) -> list[int]:
    return [number for number, item in facts.roles.items() if item.slice_group]


def full_names(inputs: Sequence[Any], facts: CaptureFacts, module: nn.Module | None) -> dict[int, str]:
    """Return a dict from the number of each input that is a parameter to its name in the partitioned model.

    Parameters that replaced those that `partition` named are named here, for later calls of the graph.
    """
    known: dict[int, str] = {}
    for state in _states(inputs, module):
        for entry in state.parameters:
            known[id(entry.param)] = entry.param.__dict__.setdefault(
                "dsgraph_name", entry.name + state.operations.label
            )
    sliced = {number: facts.roles[number].parameter for number in _sliced_numbers(facts)}
    return sliced | {number: known.get(id(inputs[number]), info.name) for number, info in facts.params.items()}


def communication_lines(
    gm: GraphModule, facts: CaptureFacts, parameters: Mapping[int, str], *, training: bool
) -> list[str]:
    """Return one line for each marker and each of the user's own collectives, and one for each parameter.

    The lines are in program order, and equal on all ranks.

    Args:
        gm: The captured graph.
        facts: What is known of it.
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
                lines.append(f"{node.target} {_shape(node.all_input_nodes[0])} over {group}")
    return [*lines, *(f"reads {name!r}" for name in parameters.values())]


def parameter_name(source: str) -> str:
    """Return the parameter's name: `L['self']._modules['block']._parameters['weight']` -> `block.weight`.

    Empty if it is not a parameter's source.
    """
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
    value = node.meta.get("val", node.meta.get("example_value"))
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else ""


def normalize_markers(gm: GraphModule) -> None:
    """Give markers one form, whatever version of torch captured them, and print them under the user's line.

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

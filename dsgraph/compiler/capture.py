"""Facts of a captured graph: its parameters, their mesh, and the communication of the graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.fx import GraphModule

from dsgraph.compat.dynamo import source_name
from dsgraph.inductor_ext import backend_name, resolve_group
from dsgraph.partitioning.additions import added_since
from dsgraph.partitioning.blocks.unit import WHOLE_MODEL, Unit
from dsgraph.partitioning.parameter import ParameterState, not_taken_in
from dsgraph.partitioning.state import PartitionState, partition_states
from dsgraph.partitioning.transforms.offloaded import state_share
from dsgraph.passes import AxisRole, CaptureFacts, GraphInput, InputRole, MeshAxis, ParameterSpec
from dsgraph.passes.ir.graph import all_graph_modules, is_gather_marker, placeholders
from dsgraph.passes.parallel.slice_walk import communicates_slices, marked_slices
from dsgraph.ranks.mesh import axis_group, mesh_axes
from dsgraph.utils.errors import PartitionError


def read_facts(
    gm: GraphModule, inputs: Sequence[Any], module: nn.Module | None = None, unit: Unit = WHOLE_MODEL
) -> CaptureFacts:
    """Return the facts that passes may use, from the markers in a captured graph and its inputs.

    Args:
        gm: The captured graph.
        inputs: Its inputs.
        module: The module that is being called; parameters have their names in it.
        unit: The unit that the graph is part of.
    """
    groups = _marker_groups(gm)
    sliced = _sliced(gm, inputs, module)
    axes: dict[str, MeshAxis] = {}
    params: dict[int, ParameterSpec] = {}
    roles = _input_roles(gm, inputs, module, unit)
    known: dict[int, tuple[ParameterState, dict[str, Any]]] = {}
    data_axes: dict[int, tuple[MeshAxis, ...]] = {}
    roles |= {number: replace(roles[number], slice_group=group) for number, (group, _) in sliced.items()}
    axes |= {group: _tensor_axis(mesh, group) for group, mesh in sliced.values()}
    for state in _states(inputs, module):
        tier = state_tier(state, device_type=_device_type(inputs))
        known |= {id(entry.param): (entry, tier) for entry in state.parameters}
        data_axes |= {id(entry.param): state.axes for entry in state.parameters}
    for entry, _ in known.values():
        for transform in entry.transforms:
            transform.attach(entry.param)
    for number, value in enumerate(inputs):
        if not isinstance(value, DTensor):
            continue
        found = [axis for axis in data_axes.get(id(value)) or mesh_axes(value.device_mesh) if axis.group in groups]
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
        block_params=MappingProxyType(_block_params(inputs, roles, known.values())),
        gathered_copies=frozenset(copies),
        device_type=_device_type(inputs),
        is_sliced=communicates_slices(gm),
    )


def _block_params(
    inputs: Sequence[Any],
    roles: Mapping[int, GraphInput],
    known: Iterable[tuple[ParameterState, dict[str, Any]]],
) -> dict[int, ParameterSpec]:
    """Return the parameters among the inputs that the graph of the step gathers."""
    reads = {id(tensor): (entry, tier) for entry, tier in known for tensor in entry.stand_ins}
    found = {}
    for number, value in enumerate(inputs):
        if id(value) in reads:
            entry, tier = reads[id(value)]
            found[number] = replace(entry.current_spec(roles[number].parameter), **tier)
    return found


def _sliced(gm: GraphModule, inputs: Sequence[Any], module: nn.Module | None) -> dict[int, tuple[str, DeviceMesh]]:
    """Return input number -> group and mesh of the ranks over which a tensor-parallel parameter is sliced.

    A stage of a pipeline holds its slices as plain tensors, and gathers others: it has none.
    """
    numbers = {node: number for number, node in enumerate(placeholders(gm))}
    found: dict[int, tuple[str, DeviceMesh]] = {}
    for node, _, _, group in marked_slices(gm):
        while node not in numbers and node.all_input_nodes:
            node = node.all_input_nodes[0]
        mesh = _tensor_mesh(inputs, module, group)
        if node in numbers and mesh is not None:
            found[numbers[node]] = (group, mesh)
    return found


def _tensor_mesh(inputs: Sequence[Any], module: nn.Module | None, group: str) -> DeviceMesh | None:
    """Return a mesh with the ranks that share parameters: that of a partitioned model, or of a parameter."""
    for state in _states(inputs, module):
        if state.tensor_mesh is not None and axis_group(state.tensor_mesh, 0).group_name == group:
            return state.tensor_mesh
    return next((value.device_mesh for value in inputs if isinstance(value, DTensor)), None)


def _tensor_axis(mesh: DeviceMesh, group: str) -> MeshAxis:
    """Return the axis of a mesh of one dimension over which operators are tensor-parallel.

    An equal mesh may have another group, because a `DTensor` returns the first one of equal meshes.
    """
    name = (mesh.mesh_dim_names or ("tensor",))[-1]
    backend = backend_name(resolve_group(group), mesh.device_type)
    return MeshAxis(name, resolve_group(group).size(), group, backend, AxisRole.TENSOR)


def parameter_spec(param: DTensor, name: str) -> ParameterSpec:
    """Return what passes see of a parameter that no `ParameterState` describes, such as one of `functional_call`."""
    axes = zip(mesh_axes(param.device_mesh), param.placements, strict=True)
    group = next((axis.group for axis, placement in axes if isinstance(placement, Shard)), "")
    shape = tuple(param.shape)
    return ParameterSpec(name, shape, _shard_shape(param), param.dtype, group, param.requires_grad)


def state_tier(state: PartitionState, *, device_type: str) -> dict[str, Any]:
    """Return the tier of the optimizer's state: on the CPU, host memory is the device's memory."""
    tier = state.arguments.offload.optimizer
    if tier == "disk" or (tier and device_type != "cpu"):
        return {"state_tier": tier, "state_share": state_share(state)}
    return {}


def _input_roles(gm: GraphModule, inputs: Sequence[Any], module: nn.Module | None, unit: Unit) -> dict[int, GraphInput]:
    """Return the role of each input of a captured graph, by its identity: the table entry that holds it.

    A parameter gets its name in `module`, so that equal layers have equal names in equal graphs; outside the module,
    the name in the table. Dynamo's source is used only for other parameters: those of `functional_call`, and of
    functions that no module calls.

    Args:
        gm: The captured graph.
        inputs: Its inputs.
        module: The module that is being called.
        unit: The unit that the graph is part of, for names in the model.
    """
    names = {id(param): name for name, param in module.named_parameters()} if module is not None else {}
    known: dict[int, GraphInput] = {}
    for entry in (entry for state in _states(inputs, module) for entry in state.parameters):
        name = names.get(id(entry.param), entry.name)
        for role, tensor in _tensors_of(entry):
            group = entry.spec.held.group if entry.spec.held is not None else ""
            item = GraphInput(role, name, slice_group=group, model_name=unit.shared_name(entry.name))
            known.setdefault(id(tensor), item)
    buffers = {id(buffer) for buffer in module.buffers()} if module is not None else set()
    found: dict[int, GraphInput] = {}
    for number, (node, value) in enumerate(zip(placeholders(gm), inputs, strict=True)):
        if id(value) in known:
            found[number] = known[id(value)]
        elif isinstance(value, (nn.Parameter, DTensor)):
            name = names.get(id(value)) or _parameter_name(source_name(node)) or node.name
            found[number] = GraphInput(InputRole.SHARD, name)
        else:
            found[number] = GraphInput(InputRole.BUFFER if id(value) in buffers else InputRole.DATA)
    return found


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
    if entry.gathered_copy is not None:
        yield InputRole.GATHERED_COPY, entry.gathered_copy
    for tensor in entry.stand_ins:
        yield InputRole.SHARD, tensor
    if entry.leaf is not None:  # an alias of the copy, or of a replicated parameter
        yield InputRole.GATHERED_COPY if entry.spec.group else InputRole.SHARD, entry.leaf
    if entry.accumulated_grad is not None:
        yield InputRole.ACCUMULATED_GRADIENT, entry.accumulated_grad
    for tensor in (tensor for transform in entry.transforms for tensor in transform.inputs):
        yield InputRole.OPTIMIZER_STATE, tensor


def _parameter_name(source: str) -> str:
    """Return the parameter's name: `L['self']._modules['block']._parameters['weight']` -> `block.weight`.

    Empty if it is not a parameter's source.
    """
    if not re.search(r"_parameters\['[^']*'\]$", source):
        return ""
    return ".".join(re.findall(r"_(?:modules|parameters)\['([^']*)'\]", source))


def refuse_added_parameters(inputs: Sequence[Any], module: nn.Module | None) -> None:
    """Refuse to train a partitioned model to which parameters were added since.

    Raises:
        PartitionError: Names the first one.
    """
    for state in _states(inputs, module) if torch.is_grad_enabled() else ():
        name = added_since(state)
        if name is not None:
            raise PartitionError(not_taken_in(name))


def _device_type(inputs: Sequence[Any]) -> str:
    """Return the accelerator of the graph, if any of its inputs is on one."""
    kinds = (value.device.type for value in inputs if isinstance(value, torch.Tensor))
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def _shard_shape(value: DTensor) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(value.to_local().shape)


def partitioned_mesh(inputs: Sequence[Any], facts: CaptureFacts, module: nn.Module | None) -> DeviceMesh | None:
    """Return the mesh of the graph's partitioned or tensor-parallel parameters; None if it has neither."""
    sliced = _sliced_numbers(facts)
    known = {id(entry.param): state for state in _states(inputs, module) for entry in state.parameters}
    for number in (*facts.params, *sliced):
        if id(inputs[number]) in known:
            return known[id(inputs[number])].parameter_mesh
        if isinstance(inputs[number], DTensor):
            return inputs[number].device_mesh
    return _tensor_mesh(inputs, module, facts.roles[sliced[0]].slice_group) if sliced else None


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


def _marker_groups(gm: GraphModule) -> set[str]:
    groups: set[str] = set()
    for module in all_graph_modules(gm):
        for node in module.graph.nodes:
            if is_gather_marker(node):
                groups.add(node.kwargs["group"])
                groups.update(node.kwargs["outer_groups"])
    return groups - {""}

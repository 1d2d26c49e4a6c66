"""Refusals of captured graphs whose writes in place would be lost, or would lose gradients."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from dsgraph.compat.dynamo import LOSES_GRADIENTS_OF_WRITTEN_RESULTS
from dsgraph.inductor_ext import share_memory
from dsgraph.partitioning.eager.full_tensor import is_name_of_write
from dsgraph.passes import CaptureFacts, GraphInput, InputRole
from dsgraph.passes.ir.graph import all_graph_modules, is_gather_marker, placeholders
from dsgraph.utils.errors import PartitionError

from .captured_sums import CHECKPOINT_REGION
from .frames import user_line


def refuse_writes(gm: GraphModule, facts: CaptureFacts) -> None:
    """Refuse a graph that writes to a full parameter (the result of a marker, or a leaf), or to a view of it.

    Raises:
        PartitionError: Names the parameter and the line.
    """
    roles = dict(zip(placeholders(gm), facts.roles.values(), strict=True))
    roles |= _roles_in_regions(gm, roles)
    for module in all_graph_modules(gm):
        parameters = _full_parameters(module, roles)
        for node in module.graph.nodes:
            value = _written(node)
            name = next((name for full, name in parameters if value is not None and share_memory(full, value)), None)
            if name is not None:
                raise PartitionError(
                    f"the forward writes to {name} ({user_line(node.stack_trace) or node}), but has only a gathered "
                    "copy of it: write to it outside the forward, or make it a buffer"
                )


def refuse_lost_gradients(gm: GraphModule) -> None:
    """Refuse an `autograd.Function` whose gradient torch loses without an error.

    Raises:
        PartitionError: Names the line that applies the function.
    """
    for module in all_graph_modules(gm) if LOSES_GRADIENTS_OF_WRITTEN_RESULTS else ():
        for call in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
            body: Any = call.args[0]
            forward = module.get_submodule(str(body.target))
            assert isinstance(forward, GraphModule)
            results: Any = forward.graph.output_node().args[0]
            returned: Sequence[Node] = results[0]
            places: list[Any] = [item.args[1] for item in call.users if item.target is operator.getitem]
            read = [returned[place] for place in places]
            writes = [node for node in returned if isinstance(node.target, str) and is_name_of_write(node.target)]
            if any(node in read or node.args[0] in read for node in writes):
                raise PartitionError(
                    f"torch {torch.__version__} compiles an autograd.Function with a gradient of zeros if its forward "
                    f"returns a tensor that it writes to in place ({user_line(call.stack_trace) or call}): return a "
                    "clone of that tensor, or use torch 2.12 or newer"
                )


def _roles_in_regions(gm: GraphModule, roles: Mapping[Node, GraphInput]) -> dict[Node, GraphInput]:
    """Return the roles of the operands of checkpoint regions, by node inside the regions, nested ones included."""
    found: dict[Node, GraphInput] = {}
    for call in gm.graph.nodes:
        if call.target is not CHECKPOINT_REGION:
            continue
        body, *operands = call.args
        region = gm.get_submodule(str(body.target))
        assert isinstance(region, GraphModule)
        inner = {
            name: roles[operand]
            for operand, name in zip(operands, placeholders(region), strict=True)
            if operand in roles
        }
        found |= {**inner, **_roles_in_regions(region, inner)}
    return found


def _full_parameters(module: GraphModule, roles: Mapping[Node, GraphInput]) -> list[tuple[Tensor, str]]:
    """Return the full parameters that a graph, or a region of it, reads."""
    names = {node: f"parameter {role.parameter!r}" for node, role in roles.items()}
    found = []
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if is_gather_marker(node):
            reads = [source for shard in node.all_input_nodes for source in shard.all_input_nodes]
            found.append((value, next((names[read] for read in reads if read in names), "a parameter")))
        elif node in roles and roles[node].role in (InputRole.SHARD, InputRole.GATHERED_COPY):
            found.append((value, names[node]))
    return found


def _written(node: Node) -> Tensor | None:
    """Return the tensor that a node writes to: its first argument, or the argument `out`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = node.op in ("call_method", "call_function") and is_name_of_write(name)
    out = node.kwargs.get("out")
    if not is_in_place and node.kwargs.get("inplace") is not True and out is None:
        return None
    target = out if isinstance(out, Node) else next(iter(node.all_input_nodes), None)
    value = target.meta.get("example_value") if target is not None else None
    return value if isinstance(value, Tensor) and not isinstance(value, DTensor) else None

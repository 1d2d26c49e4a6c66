"""Functions that passes share: finding, binding, inserting and replacing nodes of FX graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeGuard

import networkx as nx
import torch
from torch.fx import Graph, GraphModule, Node

from dsgraph.inductor_ext import c10d_functional
from dsgraph.passes.compat import OpOverload, detect_fake_mode, storage_id

from .op_traits import argument_nodes, is_unknown, parameters_of, result_aliases, traits
from .save_plan import Choice, must

# Where a node came from; a node that replaces another inherits these.
_PROVENANCE = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "partitioner_tag",
    "seq_nr",
    "from_node",
    "custom",
)


def find_calls(gm: GraphModule, target: Callable[..., Any]) -> list[Node]:
    """Return the nodes of `gm.graph` that call `target`, in program order."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target is target]


def all_graph_modules(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield `gm` and the graph modules nested in it (bodies of checkpoint regions and other higher-order ops)."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield module


def bodies(gm: GraphModule) -> Iterator[tuple[GraphModule, dict[Node, Node]]]:
    """Yield the bodies of the calls of checkpoints in a captured graph, those inside bodies as well.

    Yields:
        A body, and for each of its placeholders the node of `gm` whose value it gets, if it is one.
    """
    for call in gm.graph.nodes:
        if call.op != "call_function" or not call.args or not isinstance(call.args[0], Node):
            continue
        body = getattr(gm, str(call.args[0].target), None) if call.args[0].op == "get_attr" else None
        if not isinstance(body, GraphModule):
            continue
        pairs = zip(placeholders(body), call.args[1:], strict=False)
        outer = {inside: value for inside, value in pairs if isinstance(value, Node)}
        yield body, outer
        for inner, own in bodies(body):
            yield inner, {inside: outer[value] for inside, value in own.items() if value in outer}


# Marks a gathered parameter that a pass keeps for the backward, on the forward's node and so on the backward's input.
KEPT = "dsgraph_kept"


def is_gathered_again(started: Node) -> bool:
    """Return whether the backward repeats a gather of a joint graph, unless its wait is kept."""
    return must(started, Choice.RECOMPUTE)


def is_gather_marker(node: Node) -> bool:
    """Return whether the node is a `dsgraph::gather_param`, as written by Dynamo (packet) or AOTAutograd (overload)."""
    packet = torch.ops.dsgraph.gather_param
    return node.op == "call_function" and (node.target is packet or node.target is packet.default)


def bound_arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call to a torch op by their names in its schema, defaults filled in."""
    target = node.target
    if not isinstance(target, OpOverload):
        raise TypeError(f"{node} calls {target}, which has no schema to bind its arguments by")
    bound = {}
    for position, (name, is_positional, default) in enumerate(parameters_of(target)):
        if position < len(node.args) and is_positional:
            bound[name] = node.args[position]
        else:
            bound[name] = node.kwargs.get(name, default)
    return bound


def fake_value(node: Node) -> Any:
    """Return the fake tensor (or tuple, or number) that `node` stands for."""
    return node.meta["val"]


def emit(before: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Insert a call before `before`, with its fake value and the provenance of `before`."""
    return insert(before, target, args, kwargs, evaluate(target, args, kwargs))


def insert(before: Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Node:
    """Insert a call whose fake value is known, with the provenance of `before`."""
    graph: Graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta["val"] = value
    return come_from(node, before)


def come_from(node: Node, original: Node) -> Node:
    """Give a node that replaces a part of another one's work the provenance of that one, and return it."""
    node.meta.update({key: original.meta[key] for key in _PROVENANCE if key in original.meta})
    return node


def evaluate(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the fake value of a call; its arguments may contain nodes."""
    fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), fake_value)
    if target is operator.getitem:
        return target(*fake_args)
    mode = detect_fake_mode(fake_args)
    if mode is None:
        return target(*fake_args, **fake_kwargs)
    with mode:
        return target(*fake_args, **fake_kwargs)


def cast(before: Node, value: Node, dtype: torch.dtype) -> Node:
    """Return `value` in another dtype, computed before `before`; `value` itself if it has that dtype."""
    if fake_value(value).dtype == dtype:
        return value
    return emit(before, torch.ops.prims.convert_element_type.default, value, dtype)


def replace_and_erase(node: Node, replacement: Node) -> None:
    """Redirect all uses of `node` to `replacement`, and remove `node`."""
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def is_wait(node: Node) -> bool:
    """Return whether the node waits for a functional collective."""
    return node.op == "call_function" and node.target is c10d_functional.wait_tensor.default


def is_arrival(node: Node) -> bool:
    """Return whether the node waits for an input of the graph that is still being gathered, see `AwaitCopies`."""
    return is_wait(node) and node.all_input_nodes[0].op == "placeholder"


def wait_of(started: Node) -> Node:
    """Return the only wait for a collective, or for one result of a coalesced collective.

    Raises:
        ValueError: Something else reads the collective's result as well, or nothing does.
    """
    waits = [user for user in started.users if is_wait(user)]
    if len(waits) != 1 or len(started.users) != 1:
        raise ValueError(
            f"collective {started.name} has {len(waits)} waits and {len(started.users)} users; "
            "its one user must be its one wait"
        )
    return waits[0]


def mutates_arguments(node: Node) -> bool:
    """Return whether the node may write to one of its arguments, so that reads must not move across it."""
    known = traits(node)
    return bool(known.writes) or known.writes_anything


def is_barrier(node: Node) -> bool:
    """Return whether no communication may move across the node: it writes to an argument, or is an unknown op."""
    return mutates_arguments(node) or is_unknown(node)


def barrier_between(first: Node, last: Node) -> Node | None:
    """Return the first barrier between two nodes, in program order; None when there is none."""
    node = first.next
    while node is not last:
        if is_barrier(node):
            return node
        node = node.next
    return None


def is_view(node: Node) -> bool:
    """Return whether the node calls an op whose result shares its argument's memory."""
    return isinstance(node.target, OpOverload) and node.target.is_view


def behind_views(node: Node) -> Node:
    """Return the node whose memory a node shows through views; the node itself if it is no view."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def aliased_arguments(node: Node) -> list[Node | None]:
    """Return the argument whose memory each result of a node shares; None for new memory.

    The op's schema decides; if it says nothing, as for `reshape` and `_unsafe_view`, the fake tensors do.
    """
    value = node.meta.get("val")
    results = list(value) if isinstance(value, (tuple, list)) else [value]
    if is_wait(node) or node.target is operator.getitem:
        return [node.all_input_nodes[0]] * len(results)
    declared = _declared_aliases(node)
    if len(declared) == 1:
        declared *= len(results)  # one result that is a list, as that of `split`
    if len(declared) != len(results):
        declared = [None] * len(results)
    return [alias or _same_storage(node, result) for alias, result in zip(declared, results, strict=True)]


def _declared_aliases(node: Node) -> list[Node | None]:
    """Return, for each result in the op's schema, the argument that it aliases."""
    if not isinstance(node.target, OpOverload):
        return []
    return [next(argument_nodes(node, arguments), None) for arguments in result_aliases(node.target)]


def _same_storage(node: Node, result: Any) -> Node | None:
    if not has_storage(result):
        return None
    own = storage_id(result)
    for argument in node.all_input_nodes:
        value = argument.meta.get("val")
        if has_storage(value) and storage_id(value) == own:
            return argument
    return None


def has_storage(value: Any) -> TypeGuard[torch.Tensor]:
    """Return True for a strided tensor, whose storage identifies its memory."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def is_returned(node: Node) -> bool:
    """Return whether the graph returns the node, or a view of it."""
    frontier = [node]
    for node in frontier:
        for user in node.users:
            if user.op == "output":
                return True
            if is_view(user):
                frontier.append(user)
    return False


def placeholders(gm: GraphModule) -> list[Node]:
    """Return the inputs of `gm`, in order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def sort_topologically(graph: Graph) -> None:
    """Move nodes that precede their inputs directly after them; all others keep their order.

    Raises:
        ValueError: Nodes depend on each other in a cycle.
    """
    nodes = list(graph.nodes)
    number_of = {node: number for number, node in enumerate(nodes)}
    needs: nx.DiGraph[Node] = nx.DiGraph()
    needs.add_nodes_from(nodes)
    needs.add_edges_from((source, node) for node in nodes for source in node.all_input_nodes)
    try:
        ordered = list(nx.lexicographical_topological_sort(needs, key=number_of.__getitem__))
    except nx.NetworkXUnfeasible:
        circle = [node for node, _ in nx.find_cycle(needs)]
        raise ValueError(f"nodes depend on each other in a circle: {circle[:8]}") from None
    for last, node in pairwise(ordered):
        if last.next is not node:
            last.append(node)

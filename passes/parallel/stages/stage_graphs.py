"""The graphs of pipeline stages, cut out of a captured graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from dsgraph.passes.analysis.budget import StageNeeds

from .root_values import regions
from .split_stages import StagePlan

_NOTHING: Mapping[str, Node] = {}


class StageGraphModule(GraphModule):
    """A stage of a pipeline, which averages its gradients over ranks itself.

    Attributes:
        needs: The memory of a step besides the graph; None without a memory limit.
        is_only_compiled: True while calls only compile the graph.
    """

    needs: StageNeeds | None = None
    is_only_compiled = False


@dataclass(frozen=True)
class StageGraph:
    """One stage.

    Attributes:
        module: The graph: takes the received values, then the root inputs; returns a tuple of the sent values.
        received: Nodes of the captured graph whose values come from the previous stage.
        sent: Nodes whose values go to the next stage; for the last stage its results.
        roots: Names of the placeholders of the captured graph that it reads.
        parameters: Names of the parameters and buffers that it reads.
        repeated: Names of the nodes of its graph that each stage that needs them computes locally.
        written: Names of the buffers that it writes. Its graph takes their values after the root inputs, and returns
            new ones after the sent values.
    """

    module: StageGraphModule
    received: tuple[Node, ...]
    sent: tuple[Node, ...]
    roots: tuple[str, ...]
    parameters: tuple[str, ...]
    repeated: frozenset[str] = frozenset()
    written: tuple[str, ...] = ()


def return_only(gm: GraphModule, results: Sequence[Node]) -> None:
    """Let a graph return some of its results, and gather no slices of the others, such as logits and a cache.

    No stage then sends them to the last one.
    """
    gm.graph.output_node().args = (tuple(results),)
    gathers = (torch.ops.dsgraph.gather_slices, torch.ops.dsgraph.gather_slices.default)
    for node in [node for node in gm.graph.nodes if node.target in gathers and not node.users]:
        gm.graph.erase_node(node)


def stage_graphs(
    gm: GraphModule,
    plan: StagePlan,
    *,
    state: Mapping[str, tuple[str, Tensor]],
    results: Sequence[Node],
    repeated: Collection[Node] = (),
    written: Mapping[str, Node] = _NOTHING,
) -> list[StageGraph]:
    """Cut a graph into its stages.

    A value that a later stage reads is relayed by all stages in between, so that only neighbours communicate. Values
    that each stage can compute from only the inputs are repeated instead.

    Args:
        gm: The captured graph.
        plan: Its stages.
        state: Placeholder of a parameter or buffer -> its name and itself.
        results: The results of the last stage.
        repeated: Nodes that each stage that reads them computes locally. A result is computed once, and relayed.
        written: Placeholder of a buffer that the forward writes -> the node with its new value.
    """
    repeated = set(repeated).difference(results)
    of = {node: index for index, nodes in enumerate(plan.stages) for node in nodes}
    last = len(plan.stages) - 1
    needed = {
        node: max([of[user] for user in node.users if user in of] + [last] * (node in results), default=0)
        for node in of
    }
    crossing = [
        [node for node in of if node not in repeated and of[node] < index <= needed[node]] for index in range(last + 1)
    ]
    sent = [*crossing[1:], list(results)]
    return [
        _stage_graph(
            gm,
            _with_repeated(nodes, repeated),
            state=state,
            received=crossing[index],
            sent=sent[index],
            repeated=repeated,
            written={name: node for name, node in written.items() if of[node] == index},
        )
        for index, nodes in enumerate(plan.stages)
    ]


def _with_repeated(nodes: Sequence[Node], repeated: Collection[Node]) -> list[Node]:
    """Return a stage's nodes and the repeated nodes that they read, with the modes in which those are computed."""
    own, needed = set(nodes), dict.fromkeys(nodes)
    left = list(nodes)
    spans = [[node for node in span if node.op.startswith("call")] for span in regions(nodes[0].graph)] if nodes else []
    while left:
        fresh = [read for node in left for read in node.all_input_nodes if read in repeated]
        fresh += [node for span in spans if any(node in needed and node not in own for node in span) for node in span]
        left = [node for node in dict.fromkeys(fresh) if node not in needed]
        needed.update(dict.fromkeys(left))
    return list(nodes) if len(needed) == len(own) else [node for node in nodes[0].graph.nodes if node in needed]


def _stage_graph(
    gm: GraphModule,
    nodes: Sequence[Node],
    *,
    state: Mapping[str, tuple[str, Tensor]],
    received: Sequence[Node],
    sent: Sequence[Node],
    repeated: Collection[Node],
    written: Mapping[str, Node],
) -> StageGraph:
    graph, root = Graph(), nn.Module()
    copies: dict[Node, Node] = {node: graph.placeholder(f"received_{node.name}") for node in received}
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source.op == "placeholder")
    attributes = {source for node in nodes for source in node.all_input_nodes if source.op == "get_attr"}
    roots = [source for source in read if source.name not in state]
    copies.update((source, graph.placeholder(source.name)) for source in roots)
    buffers = [node for node in nodes[0].graph.find_nodes(op="placeholder") if node.name in written] if written else []
    copies.update((source, graph.placeholder(source.name)) for source in buffers)
    for source in read:
        if source.name in state and source.name not in written:
            name, tensor = state[source.name]
            put(root, name, tensor)
            copies[source] = graph.get_attr(name)
    for source in sorted(attributes):  # the body of a region, a constant
        setattr(root, str(source.target), getattr(gm, str(source.target)))
        copies[source] = graph.get_attr(str(source.target))
    for source, copy in copies.items():
        copy.meta["val"] = source.meta.get("val")
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in (*sent, *(written[source.name] for source in buffers))))
    graph.lint()
    module = StageGraphModule(root, graph)
    for source in buffers:
        put(module, *state[source.name])
    return StageGraph(
        module,
        tuple(received),
        tuple(sent),
        tuple(source.name for source in roots),
        tuple(state[source.name][0] for source in dict.fromkeys((*read, *buffers)) if source.name in state),
        frozenset(copies[node].name for node in nodes if node in repeated),
        tuple(state[source.name][0] for source in buffers),
    )


def describe_stages(graphs: Sequence[StageGraph]) -> list[str]:
    """Return a line for each stage, which is equal on ranks that run the same stages."""
    lines = []
    for number, graph in enumerate(graphs):
        values = [node.meta["val"] for node in graph.sent]
        sent = [(tuple(value.shape), str(value.dtype), value.requires_grad) for value in values]
        lines.append(f"stage {number} sends {sent}, reads {graph.roots}, holds {graph.parameters}")
    return lines


def put(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a parameter or buffer under a dotted name, with the modules on its path."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(leaf, tensor)
    else:
        root.register_buffer(leaf, tensor)

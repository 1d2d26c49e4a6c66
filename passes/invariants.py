"""What must hold of a graph before and after every pass, whatever the pass does."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .base import GraphPass, PassContext, Phase
from .errors import PassError
from .graph import collective_group, collectives, placeholders, wait_of


@dataclass(frozen=True)
class GraphFacts:
    """The facts about a graph that a pass must keep.

    Attributes:
        inputs: Names of the placeholders, in order.
        outputs: For each output its node's name if it is a placeholder (an alias of an input), else None; literals too.
        collectives: Per process group, the collectives in program order.
    """

    inputs: tuple[str, ...]
    outputs: tuple[object, ...]
    collectives: dict[str, tuple[Node, ...]]


def observe(gm: GraphModule) -> GraphFacts:
    """Takes down the facts before a pass runs."""
    per_group: dict[str, list[Node]] = {}
    for node in collectives(gm):
        per_group.setdefault(collective_group(node), []).append(node)
    return GraphFacts(
        inputs=tuple(node.name for node in placeholders(gm)),
        outputs=tuple(_output_alias(value) for value in _output_values(gm)),
        collectives={group: tuple(nodes) for group, nodes in per_group.items()},
    )


def check(gm: GraphModule, before: GraphFacts, graph_pass: GraphPass, ctx: PassContext) -> None:
    """Compares the graph with the facts taken before the pass.

    Raises:
        PassError: An invariant broke; the message names the pass, the node and what was expected.
    """
    after = observe(gm)
    _check_interface(before, after, graph_pass)
    if ctx.phase is Phase.CAPTURE:
        return  # torch functions: the collectives are not there yet
    _check_waits(gm, graph_pass)
    if not graph_pass.reorders_collectives:
        _check_order(before, after, graph_pass)


def _check_interface(before: GraphFacts, after: GraphFacts, graph_pass: GraphPass) -> None:
    if before.inputs != after.inputs:
        raise PassError(
            f"pass {graph_pass.name} changed the graph's inputs from {before.inputs} to {after.inputs}; "
            "a pass must leave placeholders as they are"
        )
    if len(before.outputs) != len(after.outputs):
        raise PassError(
            f"pass {graph_pass.name} changed the number of outputs from {len(before.outputs)} to {len(after.outputs)}"
        )
    for index, (was, now) in enumerate(zip(before.outputs, after.outputs, strict=True)):
        if was is not None and was != now:
            raise PassError(
                f"pass {graph_pass.name} changed output {index}, which was {was!r}, to {now!r}; "
                "an output that is an input or a constant must stay so"
            )


def _check_waits(gm: GraphModule, graph_pass: GraphPass) -> None:
    for node in collectives(gm):
        try:
            wait_of(node)
        except ValueError as error:
            raise PassError(f"after pass {graph_pass.name}, {error}") from None


def _check_order(before: GraphFacts, after: GraphFacts, graph_pass: GraphPass) -> None:
    for group, nodes in before.collectives.items():
        kept_after = [node for node in after.collectives.get(group, ()) if node in set(nodes)]
        kept_before = [node for node in nodes if node in set(kept_after)]
        for expected, found in zip(kept_before, kept_after, strict=True):
            if expected is not found:
                raise PassError(
                    f"pass {graph_pass.name} moved collective {found.name} ahead of {expected.name} in group {group!r} "
                    "without declaring reorders_collectives"
                )


def _output_values(gm: GraphModule) -> list[object]:
    output = next(iter(gm.graph.find_nodes(op="output")))
    values: list[object] = []
    map_arg(output.args, lambda node: values.append(node))
    return values


def _output_alias(value: object) -> object:
    if isinstance(value, Node):
        return value.name if value.op == "placeholder" else None
    return value

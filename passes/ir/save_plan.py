"""The save plan: each value that the backward reads is saved by the forward, or recomputed.

The plan of a joint graph is stored on its nodes, in `meta["recompute"]`, where torch's partitioner reads it, and
checkpoint regions of the model write it. For the partitioner, values to offload are saved; the tier is in a separate
key, from which `OffloadActivations` reads it. Passes never touch these keys: they call the functions below.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.passes.compat import OpOverload

aten = torch.ops.aten

_KEY = "recompute"
_TIER = "dsgraph_offload_tier"


class Choice(Enum):
    """The choice for one value."""

    SAVE = "save"
    """The forward returns it, and it stays in the device's memory until the backward has read it."""
    RECOMPUTE = "recompute"
    """The backward recomputes it, or gathers it again."""
    OFFLOAD = "offload"
    """The forward returns it, and it leaves the device's memory for a tier until the backward needs it."""


_POLICIES = {
    Choice.SAVE: CheckpointPolicy.MUST_SAVE,
    Choice.RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE,
    Choice.OFFLOAD: CheckpointPolicy.MUST_SAVE,
}


@dataclass(frozen=True)
class SavePlan:
    """The choices for a joint graph. The partitioner decides about other values.

    Attributes:
        choices: Node name -> the choice for its value.
        tiers: Node name -> "host" or "disk", for each value to offload.
    """

    choices: Mapping[str, Choice]
    tiers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, gm: GraphModule) -> SavePlan:
        """Return the plan that is stored on the nodes of a joint graph."""
        tagged = [node for node in gm.graph.nodes if _KEY in node.meta]
        found = {node.name: choice for node in tagged for choice in Choice if must(node, choice)}
        tiers = {node.name: tier for node in tagged if (tier := tier_of(node)) is not None}
        return cls(choices=found, tiers=tiers)

    def write(self, gm: GraphModule) -> None:
        """Write the choices onto the nodes of a joint graph; other nodes keep theirs.

        Raises:
            KeyError: A choice is of a node that is not in the graph.
        """
        nodes = {node.name: node for node in gm.graph.nodes}
        for name, choice in self.choices.items():
            decide(nodes[name], choice, tier=self.tiers.get(name))


def decide(node: Node, choice: Choice, *, tier: str | None = None) -> None:
    """Set the choice for a node's value.

    Args:
        node: The node.
        choice: The choice.
        tier: "host" or "disk", for a value to offload; the default is the host.
    """
    node.meta[_KEY] = _POLICIES[choice]
    node.meta.pop(_TIER, None)
    if choice is Choice.OFFLOAD:
        node.meta[_TIER] = tier or "host"


def recompute_with_users(nodes: Iterable[Node]) -> None:
    """Mark nodes for recomputation, and nodes that the forward computes cheaply from only such nodes."""
    chosen_nodes = set(nodes)
    for node in chosen_nodes:
        decide(node, Choice.RECOMPUTE)
    frontier = [user for node in chosen_nodes for user in node.users]
    while frontier:
        node = frontier.pop()
        known = node in chosen_nodes or not all(argument in chosen_nodes for argument in node.all_input_nodes)
        if known or not _is_cheap(node):
            continue
        decide(node, Choice.RECOMPUTE)
        chosen_nodes.add(node)
        frontier.extend(node.users)


def _is_cheap(node: Node) -> bool:
    target: Any = node.target
    if not isinstance(target, OpOverload) or node.meta.get("partitioner_tag") == "is_backward":
        return False
    return target.is_view or torch.Tag.pointwise in target.tags or target is aten._to_copy.default


def must(node: Node, choice: Choice) -> bool:
    """Return whether this is the choice for a node's value."""
    return node.meta.get(_KEY) is _POLICIES[choice] and (_TIER in node.meta) is (choice is Choice.OFFLOAD)


def tier_of(node: Node) -> str | None:
    """Return the tier to which a node's value is offloaded; None if it is not. It also holds in the split graphs."""
    return node.meta.get(_TIER)


def is_recomputed(node: Node) -> bool:
    """Return whether a node's value must be recomputed, or a checkpoint region prefers that."""
    return must(node, Choice.RECOMPUTE) or node.meta.get(_KEY) is CheckpointPolicy.PREFER_RECOMPUTE


def inherit(node: Node, original: Node) -> None:
    """Copy the choice for a node that `node` replaces, if there is one."""
    for key in (_KEY, _TIER):
        if key in original.meta:
            node.meta[key] = original.meta[key]


def chosen(node: Node) -> Hashable:
    """Return the choice or wish for a node, to compare with that of another; None if there is none."""
    choice, tier = node.meta.get(_KEY), tier_of(node)
    found: Hashable = choice if tier is None else (choice, tier)
    return found

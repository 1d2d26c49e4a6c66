"""What becomes of each value that the backward reads: saved by the forward, or computed again.

The plan of a joint graph lies on its nodes, in `meta["recompute"]`, where torch's partitioner reads it, and checkpoint
regions of the model write it. What is to be offloaded is saved as far as the partitioner knows; the tier lies in a key
beside it, from which `OffloadActivations` reads it. Passes never touch these keys: they call the functions below.
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
    """What becomes of one value."""

    SAVE = "save"
    """The forward returns it, and it stays in the device's memory until the backward has read it."""
    RECOMPUTE = "recompute"
    """The backward computes it again, or gathers it again."""
    OFFLOAD = "offload"
    """The forward returns it, and it leaves the device's memory for a tier until the backward needs it."""


_POLICIES = {
    Choice.SAVE: CheckpointPolicy.MUST_SAVE,
    Choice.RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE,
    Choice.OFFLOAD: CheckpointPolicy.MUST_SAVE,
}
_WISHES = {CheckpointPolicy.PREFER_SAVE: Choice.SAVE, CheckpointPolicy.PREFER_RECOMPUTE: Choice.RECOMPUTE}


@dataclass(frozen=True)
class SavePlan:
    """The choices made for a joint graph. What stands in neither mapping, the splitting chooses.

    Attributes:
        choices: Node name -> what must become of its value.
        wishes: Node name -> what a checkpoint region would rather have become of it.
        tiers: Node name -> "host" or "disk", for each that is to be offloaded.
    """

    choices: Mapping[str, Choice]
    wishes: Mapping[str, Choice] = field(default_factory=lambda: MappingProxyType({}))
    tiers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, gm: GraphModule) -> SavePlan:
        """The plan that lies on the nodes of a joint graph."""
        tagged = [node for node in gm.graph.nodes if _KEY in node.meta]
        found = {node.name: choice for node in tagged for choice in Choice if must(node, choice)}
        wishes = {node.name: _WISHES[node.meta[_KEY]] for node in tagged if node.meta[_KEY] in _WISHES}
        tiers = {node.name: tier for node in tagged if (tier := tier_of(node)) is not None}
        return cls(choices=found, wishes=wishes, tiers=tiers)

    def write(self, gm: GraphModule) -> None:
        """Writes the choices onto the nodes of a joint graph; other nodes keep what they have.

        Raises:
            KeyError: A choice is of a node that is not in the graph.
        """
        nodes = {node.name: node for node in gm.graph.nodes}
        for name, choice in self.choices.items():
            decide(nodes[name], choice, tier=self.tiers.get(name))


def decide(node: Node, choice: Choice, *, tier: str | None = None) -> None:
    """Notes what must become of a node's value.

    Args:
        node: The node.
        choice: What.
        tier: "host" or "disk", for what is to be offloaded; the host unless given.
    """
    node.meta[_KEY] = _POLICIES[choice]
    node.meta.pop(_TIER, None)
    if choice is Choice.OFFLOAD:
        node.meta[_TIER] = tier or "host"


def recompute_with_users(nodes: Iterable[Node]) -> None:
    """Notes that nodes must be computed again, and what the forward computes cheaply from such nodes alone."""
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
    """Whether that must become of a node's value."""
    return node.meta.get(_KEY) is _POLICIES[choice] and (_TIER in node.meta) is (choice is Choice.OFFLOAD)


def tier_of(node: Node) -> str | None:
    """Where a node's value must be offloaded to; None where it need not. It holds in the split graphs as well."""
    return node.meta.get(_TIER)


def is_recomputed(node: Node) -> bool:
    """Whether a node's value must be computed again, or a checkpoint region would rather have it so."""
    return must(node, Choice.RECOMPUTE) or node.meta.get(_KEY) is CheckpointPolicy.PREFER_RECOMPUTE


def inherit(node: Node, original: Node) -> None:
    """Takes over what was chosen for a node that `node` replaces, if anything was."""
    for key in (_KEY, _TIER):
        if key in original.meta:
            node.meta[key] = original.meta[key]


def chosen(node: Node) -> Hashable:
    """What was chosen for a node, or wished, to compare with that of another; None for nothing."""
    choice, tier = node.meta.get(_KEY), tier_of(node)
    found: Hashable = choice if tier is None else (choice, tier)
    return found

"""What becomes of each value that the backward reads: saved by the forward, or computed again.

The plan of a joint graph lies on its nodes, in `meta["recompute"]`, where torch's partitioner reads it, and checkpoint
regions of the model write it. Passes never touch that key: they call the functions below.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

_KEY = "recompute"


class Choice(Enum):
    """What becomes of one value."""

    SAVE = "save"
    """The forward returns it, and it stays in the device's memory until the backward has read it."""
    RECOMPUTE = "recompute"
    """The backward computes it again, or gathers it again."""


_POLICIES = {Choice.SAVE: CheckpointPolicy.MUST_SAVE, Choice.RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE}
_WISHES = {CheckpointPolicy.PREFER_SAVE: Choice.SAVE, CheckpointPolicy.PREFER_RECOMPUTE: Choice.RECOMPUTE}


@dataclass(frozen=True)
class SavePlan:
    """The choices made for a joint graph. What stands in neither mapping, the splitting chooses.

    Attributes:
        choices: Node name -> what must become of its value.
        wishes: Node name -> what a checkpoint region would rather have become of it.
    """

    choices: Mapping[str, Choice]
    wishes: Mapping[str, Choice] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, gm: GraphModule) -> SavePlan:
        """The plan that lies on the nodes of a joint graph."""
        tags = {node.name: node.meta[_KEY] for node in gm.graph.nodes if _KEY in node.meta}
        musts = {policy: choice for choice, policy in _POLICIES.items()}
        return cls(
            choices={name: musts[tag] for name, tag in tags.items() if tag in musts},
            wishes={name: _WISHES[tag] for name, tag in tags.items() if tag in _WISHES},
        )

    def write(self, gm: GraphModule) -> None:
        """Writes the choices onto the nodes of a joint graph; other nodes keep what they have.

        Raises:
            KeyError: A choice is of a node that is not in the graph.
        """
        nodes = {node.name: node for node in gm.graph.nodes}
        for name, choice in self.choices.items():
            decide(nodes[name], choice)


def decide(node: Node, choice: Choice) -> None:
    """Notes what must become of a node's value."""
    node.meta[_KEY] = _POLICIES[choice]


def must(node: Node, choice: Choice) -> bool:
    """Whether that must become of a node's value."""
    return node.meta.get(_KEY) is _POLICIES[choice]


def is_recomputed(node: Node) -> bool:
    """Whether a node's value must be computed again, or a checkpoint region would rather have it so."""
    return must(node, Choice.RECOMPUTE) or node.meta.get(_KEY) is CheckpointPolicy.PREFER_RECOMPUTE


def inherit(node: Node, original: Node) -> None:
    """Takes over what was chosen for a node that `node` replaces, if anything was."""
    if _KEY in original.meta:
        node.meta[_KEY] = original.meta[_KEY]


def chosen(node: Node) -> Hashable:
    """What was chosen for a node, or wished, to compare with that of another; None for nothing."""
    choice: Hashable = node.meta.get(_KEY)
    return choice

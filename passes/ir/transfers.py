"""The transfers of a graph: tensors that leave the device's memory, and come back."""

from __future__ import annotations

import torch
from torch.fx import Node

ops = torch.ops.dsgraph

_TIER = "transfer_tier"  # in the `meta` of a reload


def is_offload(node: Node) -> bool:
    """Return whether the node starts to store a tensor outside the device's memory."""
    return node.op == "call_function" and node.target is ops.offload.default


def is_finished_offload(node: Node) -> bool:
    """Return whether the node marks the moment when a tensor's memory may be reused."""
    return node.op == "call_function" and node.target is ops.finish_offload.default


def is_reload(node: Node) -> bool:
    """Return whether the node allocates a tensor and starts to fill it with the stored values."""
    return node.op == "call_function" and node.target is ops.reload.default


def is_fetch(node: Node) -> bool:
    """Return whether the node starts to read a stored parameter."""
    return node.op == "call_function" and node.target is ops.fetch_parameter.default


def is_taken(node: Node) -> bool:
    """Return whether the node's result is a stored parameter that was read."""
    return node.op == "call_function" and node.target is ops.take_parameter.default


def is_stored_gradient(node: Node) -> bool:
    """Return whether the node moves a gradient out of memory."""
    return node.op == "call_function" and node.target is ops.store_gradient.default


def is_transfer_wait(node: Node) -> bool:
    """Return whether the node waits for a reload."""
    return node.op == "call_function" and node.target is ops.wait_transfer.default


def starts_transfer(node: Node) -> bool:
    """Return whether the node starts to move bytes between memory and a tier below it."""
    return is_offload(node) or is_reload(node) or is_fetch(node) or is_stored_gradient(node)


def note_tier(reload: Node, tier: str) -> None:
    """Note the tier from which a reload reads: its arguments do not contain it."""
    reload.meta[_TIER] = tier


def tier_of(node: Node) -> str:
    """Return the tier to which, or from which, a node of `starts_transfer` moves bytes: "host" or "disk"."""
    if is_offload(node):
        return str(node.args[1])
    return str(node.meta[_TIER]) if is_reload(node) else "disk"


def moved_tensor(node: Node) -> Node:
    """Return the node of a tensor with the size of what a node of `starts_transfer` moves."""
    return node if is_reload(node) else node.all_input_nodes[0]


def is_transfer(node: Node) -> bool:
    """Return whether the node is any of these."""
    of_parameter = is_fetch(node) or is_taken(node) or is_stored_gradient(node)
    return of_parameter or is_offload(node) or is_finished_offload(node) or is_reload(node) or is_transfer_wait(node)

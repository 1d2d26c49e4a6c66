"""The transfers of a graph: tensors on their way out of the device's memory, and back."""

from __future__ import annotations

import torch
from torch.fx import Node

ops = torch.ops.dsgraph


def is_offload(node: Node) -> bool:
    """Whether the node starts to store a tensor outside the device's memory."""
    return node.op == "call_function" and node.target is ops.offload.default


def is_finished_offload(node: Node) -> bool:
    """Whether the node says that a tensor's memory may be used again."""
    return node.op == "call_function" and node.target is ops.finish_offload.default


def is_reload(node: Node) -> bool:
    """Whether the node allocates a tensor and starts to fill it with what is stored."""
    return node.op == "call_function" and node.target is ops.reload.default


def is_fetch(node: Node) -> bool:
    """Whether the node starts to read a parameter that is stored."""
    return node.op == "call_function" and node.target is ops.fetch_parameter.default


def is_taken(node: Node) -> bool:
    """Whether the node's result is a stored parameter that was read."""
    return node.op == "call_function" and node.target is ops.take_parameter.default


def is_stored_gradient(node: Node) -> bool:
    """Whether the node takes a gradient out of memory."""
    return node.op == "call_function" and node.target is ops.store_gradient.default


def is_transfer_wait(node: Node) -> bool:
    """Whether the node waits for a reload."""
    return node.op == "call_function" and node.target is ops.wait_transfer.default


def is_transfer(node: Node) -> bool:
    """Whether the node is any of these."""
    of_parameter = is_fetch(node) or is_taken(node) or is_stored_gradient(node)
    return of_parameter or is_offload(node) or is_finished_offload(node) or is_reload(node) or is_transfer_wait(node)

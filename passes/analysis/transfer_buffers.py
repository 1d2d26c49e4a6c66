"""How much memory parameters on disk take on their way through a graph, past what the device's allocator counts."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from dsgraph.passes.ir.graph import fake_value
from dsgraph.passes.ir.transfers import is_fetch, is_stored_gradient, is_taken, moved_tensor

from .cost import number_of, tensor_bytes


def transfer_buffers(gm: GraphModule) -> int:
    """The most bytes of buffers in use at once.

    A read takes its buffer from its start to the node that takes what was read. A write is taken to be through when
    the next one starts: the disk keeps up with the backward.

    Args:
        gm: A graph with `fetch_parameter`, `take_parameter` and `store_gradient`.

    Returns:
        Bytes; 0 for a graph without them.
    """
    reading, writing, most = 0, 0, 0
    for node in gm.graph.nodes:
        if is_taken(node):
            reading -= _bytes(node.args[1])
        elif is_fetch(node):
            reading += _bytes(moved_tensor(node))
        elif is_stored_gradient(node):
            writing = _bytes(moved_tensor(node))
        most = max(most, reading + writing)
    return most


def _bytes(node: Node) -> int:
    return number_of(node, tensor_bytes(fake_value(node)))

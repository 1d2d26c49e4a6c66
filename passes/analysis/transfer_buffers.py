"""How much memory parameters on disk take on their way through a graph, past what the device's allocator counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from dsgraph.passes.ir.graph import fake_value
from dsgraph.passes.ir.transfers import is_fetch, is_stored_gradient, is_taken, moved_tensor

from .sizes import number_of, tensor_bytes


@dataclass(frozen=True)
class StoredGradient:
    """A moment of a backward: the gradient of a parameter is on its way to the disk.

    Attributes:
        rows: The node of the parameter's rows.
        buffers: The most bytes of buffers in use from here to the next such moment.
    """

    rows: str
    buffers: int


def transfer_buffers(gm: GraphModule) -> int:
    """The most bytes of buffers in use at once.

    A read takes its buffer from its start to the node that takes what was read. A write is taken to be through when
    the next one starts: the disk keeps up with the backward.

    Args:
        gm: A graph with `fetch_parameter`, `take_parameter` and `store_gradient`.

    Returns:
        Bytes; 0 for a graph without them.
    """
    return max((used for _, used in _uses(gm)), default=0)


def stored_gradients(gm: GraphModule) -> tuple[StoredGradient, ...]:
    """When the gradients of parameters on disk are stored, and what of buffers is in use meanwhile; see above."""
    found: list[StoredGradient] = []
    for node, used in _uses(gm):
        if is_stored_gradient(node):
            found.append(StoredGradient(node.all_input_nodes[1].name, used))
        elif found:
            found[-1] = StoredGradient(found[-1].rows, max(found[-1].buffers, used))
    return tuple(found)


def _uses(gm: GraphModule) -> Iterator[tuple[Node, int]]:
    """Each node, and the bytes in use from it on."""
    reading = writing = 0
    for node in gm.graph.nodes:
        if is_taken(node):
            reading -= _bytes(node.args[1])
        elif is_fetch(node):
            reading += _bytes(moved_tensor(node))
        elif is_stored_gradient(node):
            writing = _bytes(moved_tensor(node))
        yield node, reading + writing


def _bytes(node: Node) -> int:
    return number_of(node, tensor_bytes(fake_value(node)))

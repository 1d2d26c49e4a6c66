"""Memory of transfer buffers for parameters on disk, which the device's allocator does not count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from dsgraph.passes.ir.graph import fake_value
from dsgraph.passes.ir.transfers import is_fetch, is_stored_gradient, is_taken, moved_tensor

from .sizes import number_of, tensor_bytes


@dataclass(frozen=True)
class StoredGradient:
    """A moment of a backward when the gradient of a parameter is being written to disk.

    Attributes:
        rows: The node of the parameter's rows.
        buffers: The most bytes of buffers in use from here to the next such moment.
    """

    rows: str
    buffers: int


def transfer_buffers(gm: GraphModule) -> int:
    """Return the peak bytes of buffers in use.

    A read uses its buffer from its start to the node that takes the result. A write is assumed to end when the next one
    starts: the disk keeps up with the backward.

    Args:
        gm: A graph with `fetch_parameter`, `take_parameter` and `store_gradient`.

    Returns:
        Bytes; 0 for a graph without them.
    """
    return max((used for _, used in _uses(gm)), default=0)


def stored_gradients(gm: GraphModule) -> tuple[StoredGradient, ...]:
    """Return the moments when gradients of parameters on disk are stored, with the buffers in use; see above."""
    found: list[StoredGradient] = []
    for node, used in _uses(gm):
        if is_stored_gradient(node):
            found.append(StoredGradient(node.all_input_nodes[1].name, used))
        elif found:
            found[-1] = StoredGradient(found[-1].rows, max(found[-1].buffers, used))
    return tuple(found)


def _uses(gm: GraphModule) -> Iterator[tuple[Node, int]]:
    """Yield each node, and the bytes in use from it on."""
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

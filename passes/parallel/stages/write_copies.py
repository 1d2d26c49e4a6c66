"""A pass over writes of a captured forward to a buffer, which moves them to a copy of it."""

from __future__ import annotations

from torch.fx import Graph, Node


def write_to_copy(graph: Graph, buffer: Node) -> Node:
    """Let a graph write to a copy of a buffer. Return the node of the copy, whose last value is that of the buffer.

    before:  tracked.add_(1)
    after:   copy = tracked.clone();  copy.add_(1)

    Args:
        graph: A captured forward.
        buffer: The placeholder of the buffer.
    """
    first = next(node for node in graph.nodes if buffer in node.all_input_nodes)
    with graph.inserting_before(first):
        copy = graph.call_method("clone", (buffer,))
    copy.meta.update(first.meta)  # the module, whose block is compiled with it
    copy.meta["val"] = buffer.meta["val"].clone()
    buffer.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    return copy

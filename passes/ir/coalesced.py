"""Coalesced collectives: one start for several tensors, and a separate wait for the result of each.

    started = all_gather_into_tensor_coalesced([shard_a, shard_b], 2, "0")
    a = wait_tensor(getitem(started, 0)); b = wait_tensor(getitem(started, 1))

Nothing is copied into one buffer. The functions here also support collectives of one tensor: such a collective is its
own only result.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.fx import Node

from .collectives import collective_of, is_collective
from .graph import bound_arguments, emit, fake_value, insert, replace_and_erase, wait_of
from .save_plan import inherit


def is_result(node: Node) -> bool:
    """Return whether the node is one of the results of a coalesced collective."""
    return node.target is operator.getitem and is_collective(node.all_input_nodes[0])


def results_of(started: Node) -> list[Node]:
    """Return the results to wait for: the collective itself, or each result of a coalesced one, in order."""
    if not isinstance(started.meta.get("val"), (list, tuple)):
        return [started]
    return sorted(filter(is_result, started.users), key=_index)


def inputs_of(result: Node) -> list[Node]:
    """Return the inputs of a collective for one of its `results_of`: one tensor if that is known."""
    if not is_result(result):
        return result.all_input_nodes
    started = result.all_input_nodes[0]
    given = started.args[0] if started.args else None
    if isinstance(given, (list, tuple)) and len(given) == len(started.meta["val"]):
        tensor = given[_index(result)]
        if isinstance(tensor, Node):
            return [tensor]
    return started.all_input_nodes  # messages of a list of sends and receives


def collective_behind(wait: Node) -> Node:
    """Return the collective that a wait ends; otherwise what the wait reads, such as an input of the graph."""
    source = wait.all_input_nodes[0]
    return source.all_input_nodes[0] if is_result(source) else source


def waits_of(started: Node) -> list[Node]:
    """Return the waits for a collective, one for each result, in program order.

    Raises:
        ValueError: Something else reads a result as well, or nothing waits for it.
    """
    return sorted(map(wait_of, results_of(started)))


def coalesce(members: Sequence[Node], place: Node) -> Node:
    """Replace collectives of one tensor by one of all their tensors, before `place`; their waits stay.

    Args:
        members: Collectives of one kind, group and reduce operation.
        place: A node after the arguments of all of them.
    """
    (tensor, _), *others = bound_arguments(members[0]).items()
    rest = [value for _, value in others]
    kind = collective_of(members[0])
    assert kind is not None and kind.coalesced is not None, f"{members[0]} has no form for several tensors"
    given, values = [bound_arguments(member)[tensor] for member in members], list(map(fake_value, members))
    together = insert(place, kind.coalesced, (given, *rest), {}, values)
    results = [emit(place, operator.getitem, together, index) for index in range(len(members))]
    for member, result in zip(members, results, strict=True):  # `place` may be one of them
        for node in (together, result):
            inherit(node, member)
        replace_and_erase(member, result)
    return together


def _index(result: Node) -> int:
    index = result.args[1]
    assert isinstance(index, int)
    return index

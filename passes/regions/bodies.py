"""What a segment takes, computes and hands on, in a form in which equal ones are equal."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dsgraph.passes.ir.blocks import is_plain
from dsgraph.passes.ir.graph import aliased_arguments

from .segments import Segment


@dataclass(frozen=True)
class Body:
    """A segment as a function.

    Attributes:
        segment: What it is made of.
        inputs: Nodes before the segment, in the order in which it first reads them.
        nodes: What the function computes: of the segment, and views of what it takes.
        outputs: Those of `nodes` that it returns. Each has memory of its own: Inductor takes the results of a call for
            that, and would reuse the memory of an input under a result that lies in it.
    """

    segment: Segment
    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @property
    def computes(self) -> int:
        """How many of its nodes are no views."""
        return sum(not is_view(node) for node in self.nodes)

    def key(self) -> Hashable:
        """Equal for bodies that one text can compute: equal calls on inputs of equal shapes, strides and offsets."""
        places = {node: ("input", number) for number, node in enumerate(self.inputs)}
        places |= {node: ("node", number) for number, node in enumerate(self.nodes)}

        def told(arguments: Any) -> Hashable:
            return _told(arguments, lambda node: places[same_as(node)])

        calls = tuple((node.target, told(node.args), told(node.kwargs), _described(node)) for node in self.nodes)
        return tuple(map(_described, self.inputs)), calls, tuple(places[node] for node in self.outputs)


def body_of(segment: Segment) -> Body | str:
    """A segment as a function, or why it cannot be one.

    Views of what it takes or computes are no results: who reads them outside makes them of the results anew.
    """
    members = set(segment.nodes)
    outside = {node for node in segment.nodes if not members.issuperset(node.users)}
    views = set[Node]()
    for node in reversed(segment.nodes):
        if is_view(node) and (node in outside or not views.isdisjoint(node.users)):
            views.add(node)
    outputs = [
        node for node in segment.nodes if node not in views and (node in outside or not views.isdisjoint(node.users))
    ]
    if not outputs:
        return "it hands on nothing but views"
    nodes = _in_order(segment, outputs)
    sources = (same_as(source) for node in nodes for source in node.all_input_nodes)
    inputs = dict.fromkeys(source for source in sources if source not in nodes)
    for node in (*inputs, *outputs):
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return f"{node.name}, which crosses its border, is several tensors at once"
    return Body(segment, tuple(inputs), tuple(nodes), tuple(outputs))


def _in_order(segment: Segment, outputs: list[Node]) -> dict[Node, None]:
    """What is to be computed for the outputs, in an order that is the same for all blocks.

    Views stand right ahead of their first use, and those that are made elsewhere are made anew: where torch's
    partitioner puts the views of parameters differs from block to block.
    """
    members, needed = set(segment.nodes), set(outputs)
    for node in reversed(segment.nodes):
        if node in needed:
            needed.update(members.intersection(node.all_input_nodes))
    ordered = dict[Node, None]()

    def add(node: Node) -> None:
        for source in map(same_as, node.all_input_nodes):
            may_be_added = source in members or (len(source.all_input_nodes) == 1 and is_plain(source))
            if source not in ordered and may_be_added and is_view(source):
                add(source)
        ordered[node] = None

    for node in segment.nodes:
        if node in needed and not is_view(node):
            add(node)
    return ordered


def is_view(node: Node) -> bool:
    """Whether a node's result lies, or may lie, in its argument's memory."""
    if node.target is not operator.getitem:
        return any(source is not None for source in aliased_arguments(node))
    source, index = node.args
    aliases = aliased_arguments(source) if isinstance(source, Node) else []
    return not isinstance(index, int) or index >= len(aliases) or aliases[index] is not None


def same_as(node: Node) -> Node:
    """The first node that is the same tensor: a view of a view may be what was there before both."""
    same = source = node
    while is_plain(source) and is_view(source) and len(source.all_input_nodes) == 1:
        (source,) = source.all_input_nodes
        if _described(source) == _described(node):
            same = source
    return same


def _told(value: Any, place: Callable[[Node], Hashable]) -> Hashable:
    """Arguments with nodes told by their places, and constants by type and text: 1, 1.0 and True differ."""
    if isinstance(value, Node):
        return place(value)
    if isinstance(value, (tuple, list)):
        return tuple(_told(item, place) for item in value)
    if isinstance(value, dict):
        return tuple((key, _told(item, place)) for key, item in value.items())
    return type(value), repr(value)


def _described(node: Node) -> Hashable:
    value = node.meta.get("val")
    return tuple(
        (x.dtype, x.device, tuple(x.shape), x.stride(), x.storage_offset(), x.is_conj(), x.is_neg())
        for x in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(x, torch.Tensor)
    )

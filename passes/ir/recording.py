"""Recording of functions of tensors as nodes: code that runs eagerly is traced into a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from dsgraph.passes import compat
from dsgraph.passes.compat import OpOverload, TorchDispatchMode, detect_fake_mode

from .graph import emit, fake_value, insert
from .size_nodes import SizeNodes

aten = torch.ops.aten


class Recording:
    """A recorder that writes functions, run on the values of nodes, as nodes of their graph.

        recording = Recording(node)
        twice = recording.run(lambda x: x + x, node.args[0])       # a node before `node`

    Attributes:
        place: The node before which calls are written; it may be changed between calls.
        made: The written nodes.
    """

    def __init__(self, place: Node) -> None:
        self.place = place
        self.made: list[Node] = []
        self._nodes: dict[int, Node] = {}  # of a fake value, by its identity, which the node keeps alive

    def value(self, node: Node) -> Tensor:
        """Return the fake value of a node, as input of a function."""
        value: Tensor = fake_value(node)
        self._nodes[id(value)] = node
        return value

    def node(self, value: Tensor) -> Node:
        """Return the node of a value that a recorded function returned."""
        return self._nodes[id(value)]

    def run(self, function: Callable[..., Any], *inputs: Node) -> Any:
        """Run a function on the values of nodes, write each op that it calls, and return its result."""
        values = [self.value(node) for node in inputs]
        # Tensors that it makes without an input, such as a range, must be fake too.
        with torch.no_grad(), detect_fake_mode(values) or nullcontext(), _Recorder(self):
            return function(*values)

    @cached_property
    def _sizes(self) -> SizeNodes:
        return SizeNodes(cast("GraphModule", self.place.graph.owning_module))

    def _argument(self, value: Any) -> Any:
        """Return a value as an argument of a node: dynamic sizes are nodes, too."""
        if isinstance(value, Tensor):
            return self.node(value)
        return self._sizes.node(value) if isinstance(value, torch.SymInt) else value

    def write(self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | tuple[Tensor, ...]:
        """Write a call, and return its fake value; each of several results is a node of its own."""
        if target is aten._to_copy.default and set(kwargs) == {"dtype"}:  # as casts are written in graphs
            target, args, kwargs = torch.ops.prims.convert_element_type.default, (*args, kwargs["dtype"]), {}
        args, kwargs = map_aggregate((args, kwargs), self._argument)
        node = emit(self.place, target, *args, **kwargs)
        self.made.append(node)
        if not isinstance(fake_value(node), tuple):
            return self.value(node)
        items = [emit(self.place, operator.getitem, node, number) for number in range(len(fake_value(node)))]
        self.made += items
        return tuple(map(self.value, items))


class Recordings:
    """Recordings of functions of one tensor; for further tensors of the same sizes, the nodes are copied."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Node, list[tuple[Node, Any, Any]], Node]] = {}

    def write(self, place: Node, function: Callable[[Tensor], Tensor], given: Node, *options: Any) -> list[Node]:
        """Write the ops of a function before `place`; return their nodes, and at the end that of the result.

        Args:
            place: A node.
            function: The function.
            given: The node on whose value it is run.
            options: Everything else on which it depends.
        """
        value = fake_value(given)
        sizes = (*value.shape, *value.stride())
        is_static = all(isinstance(size, int) for size in sizes)
        kind = (sizes, value.dtype, value.device, options) if is_static else given
        if kind not in self._known:
            recording = Recording(place)
            result = recording.node(recording.run(function, given))
            self._known[kind] = given, [(node, node.args, node.kwargs) for node in recording.made], result
            return [*recording.made, result]
        first, calls, result = self._known[kind]
        copies = {first: given}
        for node, args, kwargs in calls:
            copies[node] = _like(node, place, *map_arg((args, kwargs), lambda each: copies[each]))
        return [*list(copies.values())[1:], copies[result]]


def _like(node: Any, place: Node, args: Any, kwargs: Any) -> Node:
    """Write a call like that of a node, with other arguments of the same sizes."""
    value, inputs = fake_value(node), map(fake_value, node.all_input_nodes)
    if not isinstance(value, Tensor) or compat.storage_id(value) in map(compat.storage_id, inputs):
        return emit(place, node.target, *args, **kwargs)
    return insert(place, node.target, args, kwargs, compat.new_fake(compat.fake_mode_of(value), value, value.device))


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # a query of the device: nothing to record
            return func(*args)
        return self._recording.write(func, args, kwargs or {})

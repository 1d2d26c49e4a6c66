"""Recording of functions of tensors as nodes: code that runs eagerly is traced into a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from dsgraph.passes.compat import OpOverload, TorchDispatchMode, detect_fake_mode

from .graph import emit, fake_value
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


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recording.write(func, args, kwargs or {})

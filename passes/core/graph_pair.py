"""A forward and its backward, and the values that cross between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType

import torch
from torch.fx import GraphModule, Node, map_arg

from dsgraph.passes.compat import describe_saved, kind_of_saved_value
from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.graph import placeholders, replace_and_erase

from .context import PassContext


@dataclass(frozen=True)
class GraphPair:
    """The two graphs of a joint graph, for passes of `Phase.PAIR`.

    forward(inputs...)                        -> the model's outputs..., saved values...
    backward(saved values..., gradients...)   -> gradients...

    The code generators require an order. The forward returns saved tensors, then opaque objects (a `DTensor`'s mesh),
    then sizes; the backward takes sizes, then tensors, then opaque objects. `save` and `drop` keep this order.

    Attributes:
        forward: The forward.
        backward: The backward.
        user_outputs: Number of the forward's outputs that are the model's; they come first.
    """

    forward: GraphModule
    backward: GraphModule
    user_outputs: int

    @property
    def graphs(self) -> tuple[GraphModule, GraphModule]:
        """Both graphs."""
        return self.forward, self.backward

    @property
    def saved(self) -> list[Node]:
        """The forward's nodes whose values cross, in the order in which it returns them."""
        return list(_outputs(self.forward)[self.user_outputs :])

    @property
    def expected(self) -> list[Node]:
        """The forward's nodes whose values cross, in the order in which the backward takes them."""
        return [*filter(_is_size, self.saved), *(node for node in self.saved if not _is_size(node))]

    def crossing(self) -> Iterator[tuple[Node, Node]]:
        """Yield the forward's node and the backward's input of each value that crosses."""
        yield from zip(self.expected, placeholders(self.backward), strict=False)

    def save(self, value: Node) -> Node:
        """Let a tensor of the forward cross, and return the backward's input.

        If the backward recomputes it, under the name that it has in the forward, it reads the input instead.

        Raises:
            PassError: The value is no tensor.
        """
        return self.save_all([value])[0]

    def save_all(self, values: Sequence[Node]) -> list[Node]:
        """Let several tensors cross, like `save` for each.

        Raises:
            PassError: One is no tensor.
        """
        known = dict(self.crossing())
        new = [value for value in dict.fromkeys(values) if value not in known]
        for value in new:
            if not isinstance(value.meta.get("val"), torch.Tensor):
                raise PassError(f"{value.name} is no tensor: only tensors can be saved for the backward")
        self._set_saved([*new, *self.saved], added=len(new))
        first = next(node for node in placeholders(self.backward) if not _is_size(node))
        computed = {node.name: node for node in self.backward.graph.nodes}
        for value in new:
            known[value] = self._take(value, first, computed.get(value.name))
        return [known[value] for value in values]

    def _take(self, value: Node, first: Node, again: Node | None) -> Node:
        """Add the backward's input of a new saved value before `first`; `again` has the value's name there."""
        if again is not None and _call(again) != _call(value):  # a pass has made another node of that name
            value.name, again = self._free_name(value.name), None
        with self.backward.graph.inserting_before(first):
            node = self.backward.graph.placeholder(value.name)
        node.meta = dict(value.meta)
        if again is not None:
            replace_and_erase(again, node)
        node.name = node.target = value.name  # it may have been given another while that one was there
        return node

    def drop(self, value: Node) -> None:
        """Stop saving a value of the forward.

        Raises:
            PassError: It does not cross, or the backward still reads it.
        """
        self.drop_all([value])

    def drop_all(self, values: Sequence[Node]) -> None:
        """Stop saving several values.

        Raises:
            PassError: One does not cross, or the backward still reads it.
        """
        known = dict(self.crossing())
        for value in values:
            theirs = known.get(value)
            if theirs is None:
                raise PassError(f"{value.name} is not saved for the backward")
            if theirs.users:
                raise PassError(f"{value.name} is still read by {', '.join(user.name for user in theirs.users)}")
        gone, saved = dict.fromkeys(values), self.saved
        removed = [self.user_outputs + number for number, value in enumerate(saved) if value in gone]
        self._set_saved([value for value in saved if value not in gone], removed=removed)
        for value in gone:
            self.backward.graph.erase_node(known[value])

    def parts(self, ctx: PassContext) -> tuple[tuple[GraphModule, PassContext], ...]:
        """Return each graph, with the part of the pair's context that applies to it."""
        ahead = replace(ctx, part="forward", gradients=MappingProxyType({}), user_outputs=self.user_outputs)
        return (self.forward, ahead), (self.backward, replace(ctx, part="backward", user_outputs=None))

    def _free_name(self, name: str) -> str:
        taken = {node.name for gm in self.graphs for node in gm.graph.nodes}
        return next(other for other in (f"{name}_saved_{number}" for number in count()) if other not in taken)

    def _set_saved(self, saved: list[Node], *, added: int = 0, removed: Sequence[int] = ()) -> None:
        (output,) = self.forward.graph.find_nodes(op="output")
        output.args = ((*_outputs(self.forward)[: self.user_outputs], *saved),)
        describe_saved(output, self.user_outputs, added=added, removed=removed)


def _outputs(gm: GraphModule) -> tuple[Node, ...]:
    (output,) = gm.graph.find_nodes(op="output")
    return tuple(output.args[0])


def _call(node: Node) -> object:
    """Return the call of a node in a form that is equal in both graphs."""
    return node.op, node.target, map_arg((node.args, node.kwargs), lambda argument: argument.name)


def _is_size(node: Node) -> bool:
    return kind_of_saved_value(node) == 2

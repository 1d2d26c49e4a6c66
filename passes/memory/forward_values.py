"""The forward's values that the backward of a joint graph needs, and the cost of recomputing them.

part 0    embedding                    A part is a stretch of the forward: a block of a list of modules, or the code
part 1    layers.0                     between two. Its border, the values that later parts read, is always
part 2    layers.1                     saved, so that each part can be recomputed alone.
part 3    head, loss
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.analysis.fusion import inlined
from dsgraph.passes.analysis.pieces import GraphMemory
from dsgraph.passes.analysis.sizes import UNKNOWN_SIZE, hint, size_hints, tensor_bytes
from dsgraph.passes.compat import OpOverload, captured_input, is_tangent, written_inputs
from dsgraph.passes.ir.blocks import block_of, is_plain, module_of
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.graph import aliased_arguments, is_barrier, is_wait, placeholders
from dsgraph.passes.ir.save_plan import Choice, is_recomputed, must

LEAST_OFFLOADED = 64 * 1024
"""Bytes of the smallest value that is worth a transfer."""

_FUSED_SHARE = 0.5
"""Share of the time of an elementwise op that remains if the op is fused into the kernel that reads it."""


@dataclass(frozen=True)
class Value:
    """A value of the forward that can be saved or recomputed.

    Attributes:
        node: Its node.
        bytes: Bytes if it is saved; 0 for a view, and for values without memory of their own.
        seconds: Time of recomputing it.
        sources: The values of the same part from which it is computed. Those of other parts are always in memory.
        saved: True or False if that is fixed; None if there is a choice.
        may_repeat: True if it may be recomputed.
        needed: True if the backward or a later part reads it.
        may_offload: True if it may be offloaded between its last use in the forward and its first in the backward.
    """

    node: Node
    bytes: int
    seconds: float
    sources: tuple[Node, ...]
    saved: bool | None
    needed: bool
    may_repeat: bool = True
    may_offload: bool = False


@dataclass(frozen=True)
class ForwardPart:
    """A stretch of the forward.

    Attributes:
        name: The list of modules and the number in it, such as "layers.3"; empty between blocks.
        values: Its values, in program order.
        kind: Equal for parts that compute the same thing.
    """

    name: str
    values: tuple[Value, ...]
    kind: Hashable


@dataclass(frozen=True)
class ForwardValues:
    """The forward of a joint graph, part by part.

    Attributes:
        gm: The joint graph.
        memory: The memory of the joint graph, with the pieces of its values.
        forward: Nodes that do not depend on a gradient, in program order.
        results: Those of them that the model returns.
        parts: Stretches of the forward.
    """

    gm: GraphModule
    memory: GraphMemory
    forward: tuple[Node, ...]
    results: tuple[Node, ...]
    parts: tuple[ForwardPart, ...]

    @cached_property
    def values(self) -> dict[Node, Value]:
        """All values."""
        return {value.node: value for part in self.parts for value in part.values}

    @cached_property
    def gradients(self) -> frozenset[Node]:
        """See `of_gradients`."""
        return frozenset(of_gradients(self.gm))

    @cached_property
    def part_of(self) -> dict[Node, int]:
        """Node -> the number of its part."""
        return {value.node: number for number, part in enumerate(self.parts) for value in part.values}


def read_forward_values(
    gm: GraphModule, memory: GraphMemory, costs: CostModel, *, outputs: int, fuses: bool
) -> ForwardValues:
    """Read a joint graph, after all joint passes.

    Args:
        gm: A graph of ATen ops with fake values.
        memory: The memory of that graph.
        costs: The cost model.
        outputs: Number of its outputs that are the model's; they come first.
        fuses: See `PassContext`.
    """
    (output,) = gm.graph.find_nodes(op="output")
    behind = of_gradients(gm)
    ahead = [node for node in gm.graph.nodes if node not in behind and node.op == "call_function"]
    results = tuple(node for node in output.args[0][:outputs] if isinstance(node, Node))
    fused = inlined(list(gm.graph.nodes)) if fuses else frozenset()
    returned, once = frozenset(sources_of(results)), _readers_of_written(gm, ahead)
    reader = _Reader(memory, costs, forward=frozenset(ahead), returned=returned, fused=fused, once=once)
    parts = []
    for name, nodes in _stretches(ahead, list(_part_names(ahead))):
        inside = frozenset(nodes)
        values = tuple(reader.value(node, inside) for node in nodes)
        parts.append(ForwardPart(name, values, _kind(values)))
    return ForwardValues(gm, memory, tuple(ahead), results, tuple(parts))


def of_gradients(gm: GraphModule) -> set[Node]:
    """Return the nodes of a joint graph that depend on gradients of its outputs: all others can run in the forward."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        is_first = node.op == "placeholder" and is_tangent(node)
        if is_first or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def sources_of(nodes: Iterable[Node]) -> set[Node]:
    """Return nodes, and all nodes that they depend on."""
    found = set(nodes)
    frontier = list(found)
    for node in frontier:
        new = [source for source in node.all_input_nodes if source not in found]
        found.update(new)
        frontier.extend(new)
    return found


def _part_names(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield the block of each node; a node outside all modules belongs to the block of the node before."""
    name = ""
    for node in nodes:
        path = module_of(node)
        if path is not None:
            block = block_of(path)
            name = ".".join(block) if block is not None else ""
        yield name


def _stretches(nodes: Sequence[Node], names: Sequence[str]) -> Iterator[tuple[str, list[Node]]]:
    """Yield the nodes of each block, and those between two blocks; gathers of parameters may be anywhere.

    Values that only the backward reads, such as a dropout's mask, come after the whole forward.
    """
    found: dict[tuple[str, bool], list[Node]] = {}
    key = ("", False)
    for node, name in zip(nodes, names, strict=True):
        if not must(node, Choice.RECOMPUTE):
            key = (name, True) if name else (key[0], False)
        found.setdefault(key, []).append(node)
    for (name, is_block), members in found.items():
        yield name if is_block else "", members


def _kind(values: Sequence[Value]) -> Hashable:
    number = {value.node: position for position, value in enumerate(values)}
    return tuple(
        (
            value.node.target,
            value.bytes,
            value.saved,
            value.needed,
            value.may_repeat,
            value.may_offload,
            tuple(number.get(source, -1) for source in value.node.all_input_nodes),
        )
        for value in values
    )


@dataclass(frozen=True)
class _Reader:
    memory: GraphMemory
    costs: CostModel
    forward: frozenset[Node]
    returned: frozenset[Node]  # results, and what they are computed of
    fused: frozenset[Node]
    once: frozenset[Node]  # readers of an input that is written to later: the backward would read the new value

    def value(self, node: Node, part: frozenset[Node]) -> Value:
        """Return a node of a part as a value."""
        is_border = any(user in self.forward and user not in part for user in node.users)
        is_read = any(user not in self.forward and user.op != "output" for user in node.users)
        size = self._own_bytes(node)
        return Value(
            node,
            bytes=size,
            seconds=self._seconds(node),
            sources=tuple(source for source in node.all_input_nodes if source in part),
            saved=self._settled(node, size, is_border),
            needed=is_border or is_read,
            may_repeat=is_recomputed(node) or self._may_repeat(node),
            may_offload=is_read and node in self.returned and size >= LEAST_OFFLOADED and _may_leave(node),
        )

    def _settled(self, node: Node, size: int, is_border: bool) -> bool | None:
        value = node.meta.get("val")
        if is_recomputed(node):
            return False
        if must(node, Choice.SAVE) or not isinstance(value, (torch.Tensor, tuple, list)):
            return True  # a size travels for nothing
        if _is_alias(node) or isinstance(value, (tuple, list)):
            return False
        if is_border or not self._may_repeat(node):
            return True
        # Torch's partitioner never saves values that only the backward uses: it recomputes them from saved ones.
        return None if size and node in self.returned else False

    def _may_repeat(self, node: Node) -> bool:
        return node not in self.once and _may_repeat(node)

    def _own_bytes(self, node: Node) -> int:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or _is_alias(node):
            return 0
        return hint(tensor_bytes(value), size_hints(value), unknown=UNKNOWN_SIZE)

    def _seconds(self, node: Node) -> float:
        if must(node, Choice.RECOMPUTE):
            return 0.0
        seconds = self.costs.seconds(node) or 0.0
        return max(0.0, seconds - self.costs.device.kernel_s) * _FUSED_SHARE if node in self.fused else seconds


def _readers_of_written(gm: GraphModule, forward: Sequence[Node]) -> frozenset[Node]:
    """Return the nodes that read an input to which graph or caller writes, and their results if they have several.

    A batch norm reads its running mean, of which it returns a new one.
    """
    (output,) = gm.graph.find_nodes(op="output")
    numbers = written_inputs(output)
    written = {node for node in placeholders(gm) if captured_input(node) in numbers}
    written |= {node.args[0] for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    found: set[Node] = set()
    for node in forward:
        if any(source in written for source in node.all_input_nodes):
            (written if _is_alias(node) else found).add(node)
        elif node.target is operator.getitem and node.all_input_nodes[0] in found:
            found.add(node)
    return frozenset(found)


def _may_leave(node: Node) -> bool:
    """Return whether a value belongs to the graph and fills its memory, so that it can be stored as it is."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or is_collective(node) or is_wait(node) or is_recomputed(node):
        return False
    if any(user.op == "output" for user in node.users) or not all(isinstance(size, int) for size in value.shape):
        return False
    return value.layout is torch.strided and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _is_alias(node: Node) -> bool:
    """Return whether a node's memory is that of another value; a result of an op with several has its own memory."""
    if node.target is operator.getitem:
        return not isinstance(node.all_input_nodes[0].meta.get("val"), (tuple, list))
    return isinstance(node.meta.get("val"), torch.Tensor) and None not in aliased_arguments(node)


def _may_repeat(node: Node) -> bool:
    """Return whether a value may be recomputed. Random ops may: torch's partitioner saves the generator's state."""
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    op = source.target if isinstance(source.target, OpOverload) else None
    is_random = op is not None and op.namespace == "aten" and torch.Tag.nondeterministic_seeded in op.tags
    return is_random or (is_plain(node) and not is_barrier(node))

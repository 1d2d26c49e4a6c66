"""The costs of a node: floating-point operations, bytes moved by a kernel, bytes sent, and their times.

Everything is read off fake tensors: nothing is run and nothing is measured. Where sizes are symbolic, operations and
bytes are sympy expressions over the symbols of the graph; `sizes.hint` evaluates one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from dsgraph.passes.compat import OpOverload
from dsgraph.passes.ir.collectives import (
    collective_group,
    collective_kind,
    collective_of,
    collective_steps,
    is_collective,
)
from dsgraph.passes.ir.graph import aliased_arguments, mutates_arguments
from dsgraph.passes.ir.parameters import MeshAxis

from .hardware import TIERS, Device, Link, LinkTable, default_links, device_and_tiers
from .sizes import UNKNOWN_SIZE, Size, expression_of, hint, number_of, tensor_bytes

aten = torch.ops.aten


def flops(node: Node) -> Size:
    """Return the floating-point operations of a node, a multiplication and an addition counted as two.

    By torch's formulas (`torch.utils.flop_counter`), which know matrix products, convolutions and attention; 0 for
    everything else.
    """
    formula = flop_formula(node.target)
    if node.op != "call_function" or formula is None:
        return 0
    result = node.meta.get("val")
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))

    def count(of: Callable[[Any], Any]) -> Size:
        # torch's formulas compare sizes: done with symbolic sizes, that would put guards on the graph.
        given, named, out = _with_sizes((args, kwargs, result), of, of_shapes=hasattr(formula, "__wrapped__"))
        return expression_of(formula(*given, **named, out_val=out))

    try:
        return count(expression_of)
    except AssertionError:  # a guard makes sizes equal whose expressions differ
        return count(lambda size: hint(size, unknown=UNKNOWN_SIZE) if isinstance(size, torch.SymInt) else size)


def flop_formula(target: Any) -> Any:
    """Return torch's formula for an op's floating-point operations, of its arguments and `out_val`.

    None without one.
    """
    packet = target.overloadpacket if isinstance(target, OpOverload) else target
    return flop_registry.get(_SAME_FORMULA.get(packet, packet))


# Attention on the CPU is attention.
_SAME_FORMULA = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def _with_sizes(value: Any, of: Callable[[Any], Any], *, of_shapes: bool) -> Any:
    """Return `value` with shapes in place of tensors, or objects with a shape if a formula needs tensors.

    `of` returns an expression or a number for each symbolic size, and anything else unchanged.
    """
    if isinstance(value, Tensor):
        shape = tuple(map(of, value.shape))
        return shape if of_shapes else SimpleNamespace(shape=shape)
    if isinstance(value, (tuple, list)):
        return tuple(_with_sizes(item, of, of_shapes=of_shapes) for item in value)
    if isinstance(value, Mapping):
        return {key: _with_sizes(item, of, of_shapes=of_shapes) for key, item in value.items()}
    return of(value)


def moved_bytes(node: Node) -> Size:
    """Return the bytes that a node's kernel reads and writes, each operand once, without caches.

    0 for nodes without a kernel (views, waits, inputs, uninitialised memory), and for collectives, see `sent_bytes`.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return 0  # a higher-order op is no kernel; getitem and arithmetic of sizes move nothing
    if is_collective(node) or node.target in _EMPTY:
        return 0
    if not mutates_arguments(node) and all(source is not None for source in aliased_arguments(node)):
        return 0
    written = tensor_bytes(node.meta.get("val"))
    sources = list(node.all_input_nodes)
    if node.target.overloadpacket in _LOOK_UP:
        return 2 * written + sum((_read_bytes(source) for source in sources[1:]), 0)
    if node.target.overloadpacket is aten.copy_:
        sources = sources[1:]
    return written + sum(map(_read_bytes, sources), 0)


_EMPTY = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    # Transfers run beside the computation, see `CostModel.tier_seconds`.
    torch.ops.dsgraph.offload.default,
    torch.ops.dsgraph.finish_offload.default,
    torch.ops.dsgraph.reload.default,
    torch.ops.dsgraph.fetch_parameter.default,
    torch.ops.dsgraph.take_parameter.default,
    torch.ops.dsgraph.store_gradient.default,
)

# These read as much of their first argument as they write.
_LOOK_UP = (aten.embedding, aten.index, aten.index_select, aten.gather)


def _read_bytes(source: Node) -> Size:
    """Return the bytes of an operand in memory: an expanded dimension is read once."""
    value = source.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return tensor_bytes(value)
    strides = map(expression_of, value.stride())
    sizes = (expression_of(size) for size, stride in zip(value.shape, strides, strict=True) if stride != 0)
    return math.prod(sizes) * value.element_size()


def sent_bytes(node: Node, size: int) -> Size | None:
    """Return the bytes that each of `size` ranks must send for a collective, see `Collective.shares`.

    Fractions of a byte count as one.

    Returns:
        0 for a node that is no collective, None for a collective of an unknown kind.
    """
    found = collective_of(node)
    if found is None:
        return 0
    if found.shares is None:
        return None
    values = found.counted(node) if found.counted is not None else node if found.counts_result else node.args[0]
    counted = tensor_bytes(map_arg(values, lambda value: value.meta["val"]))
    if isinstance(counted, sympy.Expr):
        return sympy.ceiling(counted * sympy.Rational(found.shares(size), size))
    return found.sent_bytes(counted, size)


@dataclass(frozen=True)
class CostModel:
    """A model of the times of nodes on a device and over links.

    Attributes:
        device: The device.
        axes: The mesh axes that collectives may run over.
        links: Process group -> its link, for all kinds of collectives or one for each.
        tiers: Tier of offloaded tensors -> the link to it.
    """

    device: Device
    axes: tuple[MeshAxis, ...] = ()
    links: Mapping[str, Link | LinkTable] = field(default_factory=lambda: MappingProxyType({}))
    tiers: Mapping[str, Link] = field(default_factory=lambda: TIERS["cpu"])

    @staticmethod
    def default(axes: Sequence[MeshAxis] = (), *, device_type: str = "cpu", device_name: str = "") -> CostModel:
        """Return a model with documented values: of `PRODUCTS`, else of `DEVICES`; and of `LINKS`.

        Those of "cuda" are used for every accelerator that is not listed.

        Args:
            axes: The mesh axes.
            device_type: "cpu", "cuda", ...
            device_name: The name that the device reports, equal on all ranks; empty if unknown.
        """
        links = {axis.group: default_links(axis.backend, device_type=device_type) for axis in axes}
        device, tiers = device_and_tiers(device_type, name=device_name)
        return CostModel(device, tuple(axes), MappingProxyType(links), tiers)

    def seconds(self, node: Node) -> float | None:
        """Return the time of a node by itself: a kernel by its roofline, a collective from its start to its end.

        A wait takes no time of its own. Data-dependent sizes count as `UNKNOWN_SIZE`.

        Returns:
            Seconds; None for an unknown collective: of another kind, or of a group outside the mesh.
        """
        if "seconds" in node.meta:  # a unit of a step, predicted when its graph was compiled
            return float(node.meta["seconds"])
        if is_collective(node):
            return self._transfer_seconds(node)
        operations, moved = number_of(node, flops(node)), number_of(node, moved_bytes(node))
        return self.kernel_seconds(operations, moved, dtype=computed_dtype(node))

    def delay_seconds(self, node: Node) -> float:
        """Return the seconds by which a collective delays what the device computes beside it, see `Link`."""
        seconds = self.seconds(node)
        return seconds * self.links[collective_group(node)].of(collective_kind(node)).delay if seconds else 0.0

    def kernel_seconds(self, operations: int, moved: int, *, dtype: torch.dtype | None = None) -> float:
        """Return the time of a kernel with these operations and moved bytes; 0 if there are none.

        Args:
            operations: Floating-point operations.
            moved: Bytes read and written.
            dtype: The dtype in which it computes, see `computed_dtype`.
        """
        if not operations and not moved:
            return 0.0
        return self.device.kernel_s + max(operations / self.device.rate(dtype), moved / self.device.bytes_per_s)

    def tier_seconds(self, tier: str, size: int) -> float:
        """Return the time to move `size` bytes to a tier ("host", "disk") or back."""
        link = self.tiers[tier]
        return link.latency_s + size / link.bytes_per_s

    def transfer_seconds(self, kind: str, group: str, sent: int) -> float | None:
        """Return the time of a collective from its start to its end.

        Args:
            kind: Its name by `collective_kind`: "all_reduce".
            group: Name of the process group.
            sent: Bytes that each rank sends, see `sent_bytes`.

        Returns:
            Seconds; None for an unknown kind, or a group outside the mesh.
        """
        links = self.links.get(group)
        sizes = [axis.size for axis in self.axes if axis.group == group]
        if links is None or not sizes:
            return None
        steps = collective_steps(kind, sizes[0], trees=links.trees)
        if steps is None:
            return None
        link = links.of(kind)
        return steps * link.latency_s + sent / link.bytes_per_s

    def _transfer_seconds(self, node: Node) -> float | None:
        kind, group = collective_kind(node), collective_group(node)
        size = next((axis.size for axis in self.axes if axis.group == group), None)
        sent = sent_bytes(node, size) if size is not None else None
        return None if sent is None else self.transfer_seconds(kind, group, number_of(node, sent))


def computed_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype of a node's (first) result, which decides the device's speed; None if there is none."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return first.dtype if isinstance(first, Tensor) else None

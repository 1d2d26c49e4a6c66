r"""The memory that Inductor's fusion saves: inlined results, and results written over an operand.

A model with a few rules of Inductor's lowering (torch 2.13) before its scheduler fuses further:

- A pointwise result is part of the kernels that read it, unless another reader (a matrix product, a collective, the
  caller) needs it in memory, or computing it takes too many reads: more than `realize_acc_reads_threshold` for one
  reading kernel, more than `realize_reads_threshold` for several.
- A kernel writes its result over an operand of the same size that nothing needs afterwards.
- What such kernels compute for a concatenation they write into its result, which is allocated for the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from dsgraph.passes.compat import OpOverload

aten, prims = torch.ops.aten, torch.ops.prims

# The defaults of Inductor's configuration.
MOST_READS = 8  # realize_acc_reads_threshold
MOST_READS_SHARED = 4  # realize_reads_threshold

# Computed element by element, besides what torch tags as pointwise: copies, constants and indirect reads.
_POINTWISE = {
    aten._to_copy,
    aten.arange,
    aten.clone,
    aten.constant_pad_nd,
    aten.copy,
    aten.embedding,
    aten.full,
    aten.full_like,
    aten.gather,
    aten.index,
    aten.scalar_tensor,
    aten.select_backward,
    aten.select_scatter,
    aten.slice_backward,
    aten.slice_scatter,
    aten.where,
    prims.convert_element_type,
    prims.iota,
}

# They compute what they read as they go, but have their result in memory.
_READERS = {
    aten._unsafe_index_put,
    aten._unsafe_masked_index_put_accumulate,
    aten.all,
    aten.amax,
    aten.amin,
    aten.any,
    aten.argmax,
    aten.argmin,
    aten.cat,
    aten.index_put,
    aten.index_put_,
    aten.mean,
    aten.prod,
    aten.scatter,
    aten.scatter_add,
    aten.sum,
    aten.var,
    aten.var_mean,
}

_VIEWS = {aten._unsafe_view, aten.reshape}  # besides those that say so


def inlined(nodes: Sequence[Node]) -> frozenset[Node]:
    """Return the nodes of a graph whose results are never in memory."""
    found: set[Node] = set()
    reads: dict[Node, int] = {}  # how many values in memory it takes to compute a value, where that is not one
    for node in nodes:
        count = sum(reads.get(source, 1) for source in node.all_input_nodes)
        if _is_view(node):
            reads[node] = count
            continue
        readers = _readers(node)
        few = count <= (MOST_READS if len(readers) == 1 else MOST_READS_SHARED)
        if few and _is_pointwise(node) and readers and all(map(_computes_what_it_reads, readers)):
            found.add(node)
            reads[node] = count
    return frozenset(found)


def writes_over_operands(node: Node) -> bool:
    """Return whether a node's kernel may write its result over one of its operands."""
    return _computes_what_it_reads(node)


def is_concatenation(node: Node) -> bool:
    """Return whether a node joins its operands, so that they may be computed directly in its result."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket is aten.cat


def _readers(node: Node) -> list[Node]:
    """Return the readers of a node's result, also through views."""
    return [reader for user in node.users for reader in (_readers(user) if _is_view(user) else [user])]


def _computes_what_it_reads(node: Node) -> bool:
    return _is_pointwise(node) or (isinstance(node.target, OpOverload) and node.target.overloadpacket in _READERS)


def _is_pointwise(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (
        torch.Tag.pointwise in target.tags or target.overloadpacket in _POINTWISE
    )


def _is_view(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and (node.target.is_view or node.target.overloadpacket in _VIEWS)

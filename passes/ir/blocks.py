"""Repeated blocks of a model, found from nodes; and nodes that compute the same whenever they run."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from dsgraph.passes.compat import FakeTensor, OpOverload, known_sizes, symbolic_expression

from .collectives import is_collective
from .graph import bound_arguments, is_barrier, is_wait
from .transfers import is_transfer

# Ops that draw a number for the whole graph, or pick one: each call has another.
_SEEDS = frozenset({"prims::inductor_seed", "prims::inductor_seeds", "prims::inductor_lookup_seed"})

_MARKERS = frozenset(
    {
        torch.ops.dsgraph.gather_param.default,
        torch.ops.dsgraph.reduce_grad.default,
        torch.ops.dsgraph.reduce_compressed.default,
    }
)
_PLAIN_TENSORS = (torch.Tensor, FakeTensor)  # and no other subclass


def is_plain(node: Node) -> bool:
    """Return True if a node of a graph with fake values only computes tensors from tensors, without random numbers.

    Dynamic sizes must be determined by input sizes, not by data.
    """
    if node.op != "call_function" or is_barrier(node) or is_wait(node) or is_collective(node) or is_transfer(node):
        return False
    if node.target is operator.getitem:
        return is_plain(node.all_input_nodes[0])
    sources = [source for source in node.all_input_nodes if not _is_backed(source.meta.get("val"))]
    return _repeats(node) and all(_is_known(each) for each in (node, *sources))


def block_of(path: str) -> tuple[str, str] | None:
    """Split a path at its outermost list: `layers.3.norm` -> `("layers", "3")`; None without a list."""
    match = re.match(r"(.*?)\.(\d+)(?:\.|$)", path)
    return (match[1], match[2]) if match else None


def module_of(node: Node) -> str | None:
    """Return the path of the module in which a node, or the forward node that it differentiates, was called."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    return re.sub(r"^L\['[^']*'\](\[\d+\])*\.?", "", str(stack[next(reversed(stack))][0]))


def _repeats(node: Node) -> bool:
    """Return whether an op gives the same result for the same arguments."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or target in _MARKERS or target.name().partition(".")[0] in _SEEDS:
        return False
    # Attention, which draws random numbers for its dropout.
    return torch.Tag.nondeterministic_seeded not in target.tags or bound_arguments(node).get("dropout_p") == 0.0


def _is_known(node: Node) -> bool:
    values = list(_tensors(node.meta.get("val")))
    return bool(values) and all(
        type(value) in _PLAIN_TENSORS and value.layout is torch.strided and _has_known_sizes(value) for value in values
    )


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    else:
        yield value


def _has_known_sizes(value: torch.Tensor) -> bool:
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return all(isinstance(size, int) or _is_backed(size) for size in sizes)


def _is_backed(size: object) -> bool:
    """Return True if a size is a number or determined by input sizes."""
    if not isinstance(size, torch.SymInt):
        return False
    expression = symbolic_expression(size)
    return isinstance(expression, int) or expression.free_symbols <= known_sizes(size).keys()

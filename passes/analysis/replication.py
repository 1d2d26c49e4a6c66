"""Values of a graph that are the same on every rank of a group, as far as the graph proves it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import c10d_functional
from dsgraph.passes.compat import OpOverload
from dsgraph.passes.ir.collectives import Role, collective_of
from dsgraph.passes.ir.graph import bound_arguments

_own, _c10d = torch.ops.dsgraph, c10d_functional
_GIVES_ALL_THE_SAME = frozenset({_own.sum_slices.default, _own.gather_slices.default, _own.gather_entered.default})
_GIVES_EACH_ITS_OWN = frozenset({_own.own_slice.default, _own.scatter_sum.default})
_EQUALIZING_ROLES = frozenset({Role.GATHER, Role.ALL_REDUCE, Role.BROADCAST})
_DETERMINISTIC_NAMESPACES = frozenset({"aten", "prims", "dsgraph", _c10d.name})


def replicated_values(gm: GraphModule, group: str, *, replicated_inputs: Collection[Node]) -> set[Node]:
    """Return the nodes whose values are equal, bit for bit, on all ranks of a group.

    The caller names the replicated inputs. A sum, a gather or a broadcast over the group makes any value replicated. A
    deterministic op has replicated results if its arguments are replicated. Random ops, ops of unknown libraries,
    higher-order ops and ops that depend on the rank do not.

    Args:
        gm: A graph of ATen ops.
        group: Name of the process group.
        replicated_inputs: Placeholders whose values are equal on its ranks.
    """
    found = set[Node](replicated_inputs)
    for node in gm.graph.nodes:
        if node.op == "call_function" and _is_replicated(node, group, found):
            found.add(node)
    return found


def _is_replicated(node: Node, group: str, known: set[Node]) -> bool:
    call = bound_arguments(node) if isinstance(node.target, OpOverload) else {}
    if node.target in _GIVES_ALL_THE_SAME and call["group"] == group:
        return True
    collective = collective_of(node)
    if collective is not None and call.get("group_name") == group:
        return collective.role in _EQUALIZING_ROLES
    if not all(operand in known for operand in node.all_input_nodes):
        return False
    return collective is not None or _is_deterministic(node.target, call, group)


def _is_deterministic(target: Any, call: dict[str, Any], group: str) -> bool:
    """Return whether an op gives equal results for equal operands on every rank of the group."""
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", "") in ("_operator", "operator")  # an item of a tuple, a sum of sizes
    if target.namespace not in _DETERMINISTIC_NAMESPACES or target in _GIVES_EACH_ITS_OWN:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags

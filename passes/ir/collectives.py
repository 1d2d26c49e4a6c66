"""The table of all known collectives, with the properties that verifier, cost model, simulation and dump need.

A collective starts when its node runs and has ended when `wait_tensor` of its result returns. To add one, write its op
on floor 0 and one `Collective` into `TABLE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import COALESCING_BACKENDS, c10d_functional
from dsgraph.passes.compat import OpOverload

from .graph import bound_arguments


class Role(Enum):
    """The role of a collective."""

    GATHER = "gather"
    """Every rank gets the rows of all ranks. A partial sum stays a partial sum."""
    REDUCE_SCATTER = "reduce-scatter"
    """Every rank gets its rows of the sum."""
    ALL_REDUCE = "all-reduce"
    """Every rank gets the full sum."""
    EXCHANGE = "exchange"
    """Every rank gets its rows of each rank's input, concatenated: added up, they are a reduce-scatter."""
    BROADCAST = "broadcast"
    """Every rank gets the input of one."""
    MESSAGE = "message"
    """Some ranks send, others receive."""
    OTHER = "other"
    """It is not in the table."""


_REDUCES = frozenset({Role.REDUCE_SCATTER, Role.ALL_REDUCE})

Start = Callable[[Tensor, int, str], Tensor]
"""A function that starts a collective of a tensor, for a number of ranks and a group name."""


@dataclass(frozen=True)
class Collective:
    """The properties of a kind of collective.

    Attributes:
        op: Its form for one tensor, whose result is new memory.
        role: Its role.
        coalesced: Its form for several tensors at once, each with a result and a wait of its own; passes build it.
        other_forms: Further forms that passes do not build: in place, into an argument.
        shares: Given n ranks, how many n-ths of the counted bytes each sends: the least that any algorithm must send;
            if ranks differ, the mean. None if unknown.
        steps: Given n ranks, the number of sequential transfers until the last rank has everything.
        tree_steps: The same on a backend that runs it over trees; None if no backend does.
        counts_result: True if the result's bytes are counted, otherwise the first argument's.
        counted: Given a node, the tensors that are counted, if they are neither.
        is_read_until_wait: True if its input may be written to only after the wait; otherwise when the start returns.
        alone_on: Backends on which two of them may not run at once.
        coalesces_on: Backends that can start several at once; empty for all on which it runs.
        only_on: The only backend that supports it; empty for all.
        rows_vary: True if each rank chooses how many rows it sends to each other rank.
        start: Starts one, for measurements: a gather of this rank's rows, any other of all ranks' rows. None if it is
            not measured.
    """

    op: OpOverload
    role: Role
    coalesced: OpOverload | None = None
    other_forms: tuple[OpOverload, ...] = ()
    shares: Callable[[int], int] | None = None
    steps: Callable[[int], int] | None = None
    tree_steps: Callable[[int], int] | None = None
    counts_result: bool = False
    counted: Callable[[Node], list[Any]] | None = None
    is_read_until_wait: bool = True
    alone_on: tuple[str, ...] = ()
    coalesces_on: tuple[str, ...] = ()
    only_on: str = ""
    rows_vary: bool = False
    start: Start | None = None

    @property
    def kind(self) -> str:
        """Its name in dumps, reports and calibrations, for all of its forms: `all_reduce`."""
        name: str = self.op.overloadpacket.__name__
        return name

    @property
    def built(self) -> tuple[OpOverload, ...]:
        """The forms that passes build."""
        return (self.op,) if self.coalesced is None else (self.op, self.coalesced)

    @property
    def forms(self) -> tuple[OpOverload, ...]:
        """All forms."""
        return (*self.built, *self.other_forms)

    @property
    def reduces(self) -> bool:
        """True if its result is a sum over the ranks, or another reduction by its `reduce_op`."""
        return self.role in _REDUCES

    def sent_bytes(self, counted: int, ranks: int) -> int | None:
        """Return the bytes that each of `ranks` ranks sends, for `counted` bytes, rounded up."""
        return None if self.shares is None else -(-counted * self.shares(ranks) // ranks)


class CollectiveTable:
    """Collectives by their ops and kinds.

    Attributes:
        entries: The collectives.
        by_op: Op, in whatever form -> its collective.
        by_kind: Kind -> its collective.
    """

    def __init__(self, *entries: Collective) -> None:
        self.entries = entries
        self.by_op: Mapping[object, Collective] = MappingProxyType({op: one for one in entries for op in one.forms})
        self.by_kind: Mapping[str, Collective] = MappingProxyType({one.kind: one for one in entries})


def _others(ranks: int) -> int:
    return ranks - 1


def _tree_depth(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def _there(name: str) -> tuple[OpOverload, ...]:
    """Return an op in a tuple, empty if this torch does not have it."""
    return (getattr(c10d_functional, name).default,) if hasattr(c10d_functional, name) else ()


def _sending(node: Node) -> list[Any]:
    call = bound_arguments(node)
    return [value for op, value in zip(call["op_list"], call["tensors"], strict=True) if op == "isend"]


_c10d, _own = c10d_functional, torch.ops.dsgraph

# Steps: rings for gathers and reductions, exchanges in pairs for all-to-all, binomial trees for broadcasts. See Thakur,
# Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005. Messages go all at once.
# NCCL's all-reduce: two binary trees, up and down. See Sanders, Speck, Traeff: Two-Tree Algorithms, 2009.
TABLE = CollectiveTable(
    Collective(
        _c10d.all_gather_into_tensor.default,
        Role.GATHER,
        coalesced=_c10d.all_gather_into_tensor_coalesced.default,
        other_forms=(_c10d.all_gather_into_tensor_out.default,),
        shares=lambda n: n * (n - 1),
        steps=_others,
        alone_on=("gloo",),  # which breaks then, see `gather_by_messages`
        coalesces_on=COALESCING_BACKENDS,
        start=lambda rows, ranks, group: _c10d.all_gather_into_tensor(rows, ranks, group),
    ),
    Collective(
        _own.gather_by_messages.default,
        Role.GATHER,
        coalesced=_own.gather_by_messages_coalesced.default,
        shares=lambda n: n * (n - 1),
        steps=lambda n: 1,
        is_read_until_wait=False,  # copied to where the others' rows arrive
        only_on="gloo",
        start=lambda rows, ranks, group: _own.gather_by_messages(rows, ranks, group),
    ),
    Collective(
        _own.exchange_by_messages.default,
        Role.EXCHANGE,
        coalesced=_own.exchange_by_messages_coalesced.default,
        shares=_others,
        steps=lambda n: 1,
        only_on="gloo",
        start=lambda whole, ranks, group: _own.exchange_by_messages(whole, ranks, group),
    ),
    Collective(
        _c10d.reduce_scatter_tensor.default,
        Role.REDUCE_SCATTER,
        coalesced=_c10d.reduce_scatter_tensor_coalesced.default,
        other_forms=_there("reduce_scatter_tensor_out"),
        shares=lambda n: n * (n - 1),
        steps=_others,
        counts_result=True,
        coalesces_on=COALESCING_BACKENDS,
        start=lambda whole, ranks, group: _c10d.reduce_scatter_tensor(whole, "sum", ranks, group),
    ),
    Collective(
        _c10d.all_to_all_single.default,
        Role.EXCHANGE,
        shares=_others,
        steps=_others,
        rows_vary=True,
        start=lambda whole, ranks, group: _c10d.all_to_all_single(
            whole, [len(whole) // ranks] * ranks, [len(whole) // ranks] * ranks, group
        ),
    ),
    Collective(
        _c10d.all_reduce.default,
        Role.ALL_REDUCE,
        other_forms=(
            _c10d.all_reduce_.default,
            _c10d.all_reduce_coalesced.default,
            _c10d.all_reduce_coalesced_.default,
        ),
        shares=lambda n: 2 * (n - 1),
        steps=lambda n: 2 * (n - 1),
        tree_steps=lambda n: 2 * _tree_depth(n),
        is_read_until_wait=False,  # it works on a copy
        start=lambda whole, ranks, group: _c10d.all_reduce(whole, "sum", group),
    ),
    Collective(
        _c10d.broadcast.default,
        Role.BROADCAST,
        other_forms=(_c10d.broadcast_.default,),
        shares=_others,
        steps=_tree_depth,
        is_read_until_wait=False,  # it works on a copy
    ),
    *(Collective(op, Role.MESSAGE, shares=lambda n: n, steps=lambda n: 1) for op in _there("isend")),
    *(Collective(op, Role.MESSAGE, shares=lambda n: 0, steps=lambda n: 1) for op in _there("irecv")),
    *(Collective(op, Role.MESSAGE, shares=lambda n: n, counted=_sending) for op in _there("batch_p2p_ops")),
)


def collective_of(node: Node) -> Collective | None:
    """Return the properties of the collective that a node starts; None for any other node."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return None
    return _known(target)


@cache  # of the table lookup, too: hashing an op runs Python code
def _known(target: OpOverload) -> Collective | None:
    """Return the properties of an op of the table, or of another functional collective of torch; else None."""
    is_functional = target.namespace == c10d_functional.name and target is not c10d_functional.wait_tensor.default
    return TABLE.by_op.get(target) or (Collective(target, Role.OTHER) if is_functional else None)


def is_collective(node: Node) -> bool:
    """Return whether the node starts a collective that `wait_tensor` ends."""
    return collective_of(node) is not None


def is_gather(node: Node) -> bool:
    """Return whether the node starts a gather in a form that passes build, of one tensor or of several."""
    found = collective_of(node)
    return found is not None and found.role is Role.GATHER and node.target in found.built


def is_reduction(node: Node) -> bool:
    """Return whether the node starts a reduction, or an exchange whose results are summed on this rank."""
    found = collective_of(node)
    return found is not None and (found.reduces or found.role is Role.EXCHANGE) and node.target in found.built


def has_role(node: Node, role: Role) -> bool:
    """Return whether the node starts a collective of a role, in any form."""
    found = collective_of(node)
    return found is not None and found.role is role


def collective_kind(node: Node) -> str:
    """Return the kind of the collective that a node starts, such as `all_reduce`, for all of its forms."""
    found = collective_of(node)
    assert found is not None
    return found.kind


def collective_steps(kind: str, ranks: int, *, trees: bool = False) -> int | None:
    """Return the number of sequential transfers of a kind of collective over `ranks` ranks; None for an unknown kind.

    With `trees`, the backend runs kinds that have `tree_steps` over trees.
    """
    found = TABLE.by_kind.get(kind)
    steps = None if found is None else (trees and found.tree_steps) or found.steps
    return None if steps is None else steps(ranks)


def collective_group(node: Node) -> str:
    """Return the process group that a collective names."""
    return str(bound_arguments(node)["group_name"])


def collectives(gm: GraphModule) -> list[Node]:
    """Return the collectives of `gm`, in program order."""
    return [node for node in gm.graph.nodes if is_collective(node)]

"""Tensors that nothing may touch during a transfer out of the device's memory or back."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from dsgraph.passes.ir.op_traits import written_nodes
from dsgraph.passes.ir.transfers import (
    is_fetch,
    is_finished_offload,
    is_offload,
    is_reload,
    is_stored_gradient,
    is_taken,
    is_transfer_wait,
)

from .memory import MemoryFacts, Roots

Violation = tuple[str, str]
"""The identity of a broken rule, and the sentence for it."""


def wrong_transfers(gm: GraphModule, memory: MemoryFacts) -> Iterator[Violation]:
    """Yield each offload and reload without a correct end, and each write to a tensor that is being offloaded."""
    leaving: dict[Node, Roots] = {}
    for node in gm.graph.nodes:
        if is_offload(node):
            leaving[node] = memory.roots(node.all_input_nodes[0])
            yield from _wrong_end(node)
        elif is_reload(node):
            yield from _wrong_wait(node)
        elif is_fetch(node):
            yield from _wrong_take(node)
        elif is_stored_gradient(node):
            yield from _wrong_place(node)
        elif is_finished_offload(node):
            yield from _wrong_source(node, leaving, memory)
        elif leaving:
            written = {root for target in written_nodes(node) for root in memory.roots(target)}
            for offload, roots in leaving.items():
                if not written.isdisjoint(roots):
                    yield (
                        f"leaving {node.name} {offload.name}",
                        f"{node.name} writes to {offload.all_input_nodes[0].name} while offload {offload.name} reads "
                        "it; nothing may do so before its finish_offload",
                    )


def _wrong_end(offload: Node) -> Iterator[Violation]:
    ends = [user for user in offload.users if is_finished_offload(user)]
    if len(ends) != 1 or len(offload.users) != 1:
        yield (
            f"offload {offload.name}",
            f"offload {offload.name} has {len(ends)} finish_offload and {len(offload.users)} users; its one user must "
            "be its one finish_offload, and whatever crosses to the backward must be that one's result",
        )


def _wrong_source(end: Node, leaving: dict[Node, Roots], memory: MemoryFacts) -> Iterator[Violation]:
    handle, source = end.args
    roots = leaving.pop(handle, None) if isinstance(handle, Node) else None
    if roots is not None and isinstance(source, Node) and memory.roots(source) != roots:
        yield (
            f"source {end.name}",
            f"{end.name} ends an offload of {handle}, but keeps {source.name} alive; it must be given the tensor that "
            "is offloaded",
        )


def _wrong_take(fetch: Node) -> Iterator[Violation]:
    users = [user for user in fetch.users if not is_stored_gradient(user)]
    takes = [user for user in users if is_taken(user) and user.args[1] is fetch.args[0]]
    if len(takes) != 1 or len(users) != 1:
        yield (
            f"fetch {fetch.name}",
            f"fetch_parameter {fetch.name} has {len(takes)} take_parameter of {fetch.args[0]} and {len(users)} users "
            "besides store_gradient; its one user must be its one take_parameter, of the same parameter",
        )


def _wrong_place(store: Node) -> Iterator[Violation]:
    """Yield reads that start after the gradient is stored: an optimizer may update the parameter from then on."""
    rows = store.args[1]
    assert isinstance(rows, Node)
    for fetch in (user for user in rows.users if is_fetch(user)):
        if store < fetch or fetch not in store.all_input_nodes:
            yield (
                f"store {store.name} {fetch.name}",
                f"{store.name} stores the gradient of {rows.name}, which may be updated from then on, and does not "
                f"depend on {fetch.name}, which reads it; it must take that one's result as its third argument",
            )


def _wrong_wait(reload: Node) -> Iterator[Violation]:
    waits = [user for user in reload.users if is_transfer_wait(user)]
    if len(waits) != 1 or len(reload.users) != 1:
        yield (
            f"reload {reload.name}",
            f"reload {reload.name} has {len(waits)} waits and {len(reload.users)} users; its one user must be its one "
            "wait_transfer, and whatever reads the result must read that wait",
        )

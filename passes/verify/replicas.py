"""What a pass must keep of the waits for replicas, which are on their way when a graph begins to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule

from dsgraph.passes.core.context import PassContext
from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.graph import is_arrival, placeholders

Violation = tuple[str, str]
"""What identifies a broken rule, and the sentence that says it."""


@dataclass(frozen=True)
class ReplicaFacts:
    """The replicas that a graph waits for.

    Attributes:
        awaited: Their names.
        used: Names of all replicas that the graph reads or hands on.
        violations: Rules that this graph breaks whatever it was before.
    """

    awaited: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()
    violations: tuple[Violation, ...] = ()


def observe(gm: GraphModule, ctx: PassContext) -> ReplicaFacts:
    """Takes down the waits for replicas of one graph."""
    if not ctx.replicas:
        return ReplicaFacts()
    replicas = [node for node in placeholders(gm) if node.name in ctx.replicas]
    awaited = frozenset(node.name for node in replicas if any(map(is_arrival, node.users)))
    used = frozenset(node.name for node in replicas if node.users)
    return ReplicaFacts(awaited, used, tuple(_early_reads(gm, awaited)))


def _early_reads(gm: GraphModule, awaited: frozenset[str]) -> Iterator[Violation]:
    for replica in placeholders(gm):
        if replica.name not in awaited:
            continue
        waits = [user for user in replica.users if is_arrival(user)]
        for user in replica.users:
            # Handed on for the backward, it has arrived when the graph is through.
            if user not in waits and user.op != "output":
                yield (
                    f"arrival {user.name} {replica.name}",
                    f"{user.name} reads replica {replica.name}, which may be under way; it must read {waits[0].name}, "
                    "the wait_tensor for it",
                )


def check(before: ReplicaFacts, after: ReplicaFacts, who: str) -> None:
    """Compares the waits for replicas before and after a pass.

    Raises:
        PassError: A replica that is still used is no longer waited for.
    """
    for name in sorted((before.awaited - after.awaited) & after.used):
        raise PassError(
            f"{who} removed the wait_tensor for replica {name!r}, which may be under way when it is read: keep it"
        )

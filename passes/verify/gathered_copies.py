"""Rules for the waits for gathered copies, which may still be gathering when a graph begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule

from dsgraph.passes.core.context import PassContext
from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.graph import is_arrival, placeholders

Violation = tuple[str, str]
"""The identity of a broken rule, and the sentence for it."""


@dataclass(frozen=True)
class CopyFacts:
    """The gathered copies that a graph waits for.

    Attributes:
        awaited: Their names.
        used: Names of all gathered copies that the graph reads or passes on.
        violations: Rules that this graph breaks, whatever it was before.
    """

    awaited: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()
    violations: tuple[Violation, ...] = ()


def observe(gm: GraphModule, ctx: PassContext) -> CopyFacts:
    """Return the waits for gathered copies of one graph."""
    if not ctx.gathered_copies:
        return CopyFacts()
    gathered_copies = [node for node in placeholders(gm) if node.name in ctx.gathered_copies]
    awaited = frozenset(node.name for node in gathered_copies if any(map(is_arrival, node.users)))
    used = frozenset(node.name for node in gathered_copies if node.users)
    return CopyFacts(awaited, used, tuple(_early_reads(gm, awaited)))


def _early_reads(gm: GraphModule, awaited: frozenset[str]) -> Iterator[Violation]:
    for gathered_copy in placeholders(gm):
        if gathered_copy.name not in awaited:
            continue
        waits = [user for user in gathered_copy.users if is_arrival(user)]
        for user in gathered_copy.users:
            # Handed on for the backward, it has arrived when the graph is through.
            if user not in waits and user.op != "output":
                yield (
                    f"arrival {user.name} {gathered_copy.name}",
                    f"{user.name} reads gathered copy {gathered_copy.name}, which may be under way; it must "
                    f"read {waits[0].name}, the wait_tensor for it",
                )


def check(before: CopyFacts, after: CopyFacts, who: str) -> None:
    """Compare the waits for gathered copies before and after a pass.

    Raises:
        PassError: A gathered copy that is still used is no longer waited for.
    """
    for name in sorted((before.awaited - after.awaited) & after.used):
        raise PassError(
            f"{who} removed the wait_tensor for gathered copy {name!r}, which may be under way when it is read: keep it"
        )

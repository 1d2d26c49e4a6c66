"""Ranks that stand still at each collective until all members of its group stand at the same one.

No backend is stricter: a program that ends here can deadlock nowhere, however few streams or buffers there
are. Only the order of collectives matters, so that nothing is computed and nothing sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from dsgraph.passes import PassContext
from dsgraph.passes.core.collective_order import collective_lines
from dsgraph.passes.ir.collectives import collective_group, collectives


class DeadlockError(AssertionError):
    """Ranks stand at collectives that their peers never come to; the message says who, where, and for whom."""


@dataclass(frozen=True)
class Step:
    """A collective of one rank's program.

    Attributes:
        name: Of the node.
        members: The ranks of its group.
        what: What it does, in words that are the same on all ranks.
    """

    name: str
    members: frozenset[int]
    what: str


def steps(gm: GraphModule, ctx: PassContext, *, members: Mapping[str, Collection[int]]) -> list[Step]:
    """The collectives of a graph, in program order; `members`: group name -> its ranks."""
    return [
        Step(node.name, frozenset(members[collective_group(node)]), f"{ctx.phase.value}: {line}")
        for node, line in zip(collectives(gm), collective_lines(gm, ctx), strict=True)
    ]


def run(programs: Mapping[int, Sequence[Step]]) -> int:
    """Runs the programs of all ranks to their end; returns how many collectives there were.

    Raises:
        DeadlockError: Some ranks cannot go on.
    """
    done = dict.fromkeys(programs, 0)
    count = 0
    while True:
        at = {rank: program[done[rank]] for rank, program in programs.items() if done[rank] < len(program)}
        if not at:
            return count
        ready = {step for step in at.values() if all(_is_same(at.get(peer), step) for peer in step.members)}
        through = {step.members for step in ready}
        if not through:
            raise DeadlockError("; ".join(_describe(rank, step, at) for rank, step in sorted(at.items())))
        count += len(through)
        for rank, step in at.items():
            done[rank] += step.members in through


def only(programs: Mapping[int, Sequence[Step]], groups: Collection[frozenset[int]]) -> dict[int, list[Step]]:
    """The programs less the collectives of other groups."""
    return {rank: [step for step in program if step.members in groups] for rank, program in programs.items()}


def _is_same(step: Step | None, other: Step) -> bool:
    return step is not None and (step.members, step.what) == (other.members, other.what)


def _describe(rank: int, step: Step, at: Mapping[int, Step]) -> str:
    absent = [peer for peer in sorted(step.members) if not _is_same(at.get(peer), step)]
    places = ", ".join(f"rank {peer} at {at[peer].name if peer in at else 'its end'}" for peer in absent)
    return f"rank {rank} stands at {step.name} of ranks {sorted(step.members)}" + (f" for {places}" if places else "")

"""Pipeline schedules: which rank holds which stage, and whether the order of their actions can be run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsgraph.errors import OptionError

# Schedules of torch.distributed.pipelining by the names that users give them. True: several stages a rank.
SCHEDULES = {
    "GPipe": False,
    "1F1B": False,
    "Interleaved1F1B": True,
    "InterleavedZeroBubble": True,
    "ZBVZeroBubble": True,
    "DualPipeV": True,
}
# Two stages a rank, the second on the way back.
_V_SHAPED = frozenset({"ZBVZeroBubble", "DualPipeV"})

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def stages_of_ranks(kind: str, *, ranks: int, stages: int) -> list[list[int]]:
    """The stages of each rank.

    Raises:
        OptionError: The schedule does not run on so many stages.
    """
    if kind not in SCHEDULES:
        raise OptionError(f"pipeline: schedule={kind!r} is unknown; known are {', '.join(SCHEDULES)}")
    wanted = f"{2 * ranks}" if kind in _V_SHAPED else f"a multiple of {ranks}" if SCHEDULES[kind] else f"{ranks}"
    fits = stages == 2 * ranks if kind in _V_SHAPED else stages % ranks == 0 if SCHEDULES[kind] else stages == ranks
    if not fits or stages < 1:
        raise OptionError(f"pipeline: {kind} on {ranks} ranks takes {wanted} stages, not {stages}")
    if kind in _V_SHAPED:
        return [[rank, stages - 1 - rank] for rank in range(ranks)]
    return [list(range(rank, stages, ranks)) for rank in range(ranks)]


def actions_of(schedule: Any, kind: str, *, stages: int, microbatches: int) -> dict[int, list[str]]:
    """What each rank computes, in order, as torch writes it: `0F3` is the forward of stage 0 for micro-batch 3.

    Schedules of several stages a rank are read off torch's object. Those of one stage do not run by a list, and the
    list that torch 2.13 gives for 1F1B leaves out the last rank's first forward: theirs is written here.

    Args:
        schedule: One of `torch.distributed.pipelining`.
        kind: Its name here.
        stages: Number of stages.
        microbatches: Number of micro-batches.
    """
    if SCHEDULES[kind]:
        order = schedule.pipeline_order
        return {rank: [str(action) for action in actions if action is not None] for rank, actions in order.items()}
    ahead = [microbatches if kind == "GPipe" else stages - rank for rank in range(stages)]
    return {rank: _one_stage(rank, microbatches, ahead=ahead[rank]) for rank in range(stages)}


def _one_stage(stage: int, count: int, *, ahead: int) -> list[str]:
    """Forwards ahead, then one backward and one forward in turn, then the other backwards."""
    order = [f"{stage}F{batch}" for batch in range(min(ahead, count))]
    for batch in range(count):
        order.append(f"{stage}B{batch}")
        if batch + ahead < count:
            order.append(f"{stage}F{batch + ahead}")
    return order


def check_order(actions: Mapping[int, Sequence[str]], *, stages: int) -> None:
    """Runs the actions of all ranks, each rank in its order, every action after those whose results it reads.

    Args:
        actions: Actions of each rank, as torch writes them: `1F0` forward, `1B0` whole backward, `1I0` its input
            gradients, `1W0` its weight gradients; two joined are written `(1F0;0B2)OVERLAP_F_B`.
        stages: Number of stages.

    Raises:
        OptionError: The ranks wait for each other; names what each of them waits for.
    """
    orders = {rank: [_ACTION.findall(text) for text in texts] for rank, texts in actions.items()}
    at, done = dict.fromkeys(orders, 0), set[tuple[str, int, int]]()
    moved = True
    while moved:
        moved = False
        for rank, order in orders.items():
            while at[rank] < len(order):
                parts = [(kind, int(stage), int(batch)) for stage, kind, batch in order[at[rank]]]
                if any(need not in done for part in parts for need in _needs(part, stages)):
                    break
                done.update(parts)
                done.update(("I", stage, batch) for kind, stage, batch in parts if kind == "B")
                at[rank], moved = at[rank] + 1, True
    waiting = {rank: actions[rank][at[rank]] for rank in orders if at[rank] < len(orders[rank])}
    if waiting:
        named = ", ".join(f"rank {rank} at {text}" for rank, text in waiting.items())
        raise OptionError(f"pipeline: the schedule deadlocks: {named}; each waits for another's result")


def _needs(part: tuple[str, int, int], stages: int) -> list[tuple[str, int, int]]:
    kind, stage, batch = part
    if kind == "F":
        return [("F", stage - 1, batch)] if stage else []
    if kind == "W":
        return [("I", stage, batch)]
    own = [("F", stage, batch)]
    return own if stage == stages - 1 else [*own, ("I", stage + 1, batch)]

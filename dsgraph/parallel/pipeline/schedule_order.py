"""Pipeline schedules: the stages of each rank, and a check that the order of their actions can be run."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsgraph.utils.errors import OptionError

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

# Schedules that run at least as many micro-batches per round as there are ranks.
_IN_ROUNDS = frozenset({"Interleaved1F1B", "InterleavedZeroBubble"})

# They compute the gradients of inputs and of weights apart, by walking autograd's graph.
ZERO_BUBBLE = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})

# They hold the messages that they send until the end of a step.
HOLDS_SENT = frozenset(SCHEDULES) - {"1F1B"}

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_Part = tuple[str, int, int]  # kind, stage, micro-batch
# Time of each kind of action, in units of a stage's forward; gradients of inputs and of weights take one each.
_COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def stages_of_ranks(kind: str, *, ranks: int, stages: int) -> list[list[int]]:
    """Return the stages of each rank.

    Raises:
        OptionError: The schedule does not support this number of stages.
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


def check_microbatches(kind: str, *, ranks: int, stages: int, microbatches: int) -> None:
    """Check that a schedule can run this number of micro-batches.

    Raises:
        OptionError: It cannot; the message names the nearest numbers that it can run.
    """
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise OptionError(f"pipeline: microbatches is {microbatches!r}; it takes a whole number, {stages} or more")
    if microbatches < stages:
        raise OptionError(
            f"pipeline: {microbatches} micro-batches are fewer than {stages} stages: use at least {stages}"
        )
    if kind in _IN_ROUNDS and not _fills_rounds(microbatches, ranks):
        near = [next(_counts_beside(microbatches, step, ranks)) for step in (-1, 1)]
        fits = " or ".join(str(count) for count in near if count >= stages)
        raise OptionError(
            f"pipeline: {kind} on {ranks} ranks runs micro-batches in {microbatches // ranks} equal rounds, which "
            f"{microbatches} do not fill: use {fits} micro-batches"
        )


def _fills_rounds(microbatches: int, ranks: int) -> bool:
    """Return True if micro-batches fill the rounds of torch's interleaved schedules."""
    return microbatches % max(1, microbatches // ranks) == 0


def _counts_beside(microbatches: int, step: int, ranks: int) -> Iterator[int]:
    return filter(lambda count: _fills_rounds(count, ranks), itertools.count(microbatches + step, step))


def actions_of(schedule: Any, kind: str, *, stages: int, microbatches: int) -> dict[int, list[str]]:
    """Return the actions of each rank, in order, in torch's notation: `0F3` is stage 0's forward of micro-batch 3.

    Schedules of several stages a rank are read off torch's object. Those of one stage do not use a list, and torch
    2.13's list for 1F1B lacks the last rank's first forward: their lists are made here.

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
    """Return `ahead` forwards, then one backward and one forward in turn, then the other backwards."""
    order = [f"{stage}F{batch}" for batch in range(min(ahead, count))]
    for batch in range(count):
        order.append(f"{stage}B{batch}")
        if batch + ahead < count:
            order.append(f"{stage}F{batch + ahead}")
    return order


@dataclass(frozen=True)
class Slot:
    """The time of one action of a rank.

    Attributes:
        rank: Rank in the pipeline.
        action: The action as torch writes it.
        start: Its start, in units of one forward of a stage.
        end: Its end, in the same units.
    """

    rank: int
    action: str
    start: float
    end: float

    @property
    def kinds(self) -> list[tuple[str, float]]:
        """Its parts in order, with their durations: "F" forward, "B" backward, "I" and "W" halves of the backward."""
        return [(kind, _COSTS[kind]) for kind, _, _ in _parts(self.action)]


def check_order(actions: Mapping[int, Sequence[str]], *, stages: int) -> list[Slot]:
    """Simulate the actions of all ranks, each rank in its order, every action after those whose results it reads.

    A forward takes 1, a full backward 2, the gradients of only inputs or only weights 1. Sending takes no time.

    Args:
        actions: Actions of each rank, as torch writes them: `1F0` forward, `1B0` full backward, `1I0` its input
            gradients, `1W0` its weight gradients; two joined are written `(1F0;0B2)OVERLAP_F_B`.
        stages: Number of stages.

    Returns:
        The time of each action.

    Raises:
        OptionError: The ranks wait for each other; names what each of them waits for.
    """
    orders = {rank: [_parts(text) for text in texts] for rank, texts in actions.items()}
    at, free, done = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0.0), dict[_Part, float]()
    slots: list[Slot] = []
    moved = True
    while moved:
        moved = False
        for rank, order in orders.items():
            while at[rank] < len(order):
                parts = order[at[rank]]
                needs = [need for part in parts for need in _needs(part, stages)]
                if any(need not in done for need in needs):
                    break
                start = max([free[rank], *(done[need] for need in needs)])
                end = free[rank] = start + sum(_COSTS[kind] for kind, _, _ in parts)
                slots.append(Slot(rank, actions[rank][at[rank]], start, end))
                done.update(dict.fromkeys(parts, end))
                done.update({("I", stage, batch): end for kind, stage, batch in parts if kind == "B"})
                at[rank], moved = at[rank] + 1, True
    waiting = {rank: actions[rank][at[rank]] for rank in orders if at[rank] < len(orders[rank])}
    if waiting:
        named = ", ".join(f"rank {rank} at {text}" for rank, text in waiting.items())
        raise OptionError(f"pipeline: the schedule deadlocks: {named}; each waits for another's result")
    return slots


def most_in_flight(actions: Sequence[str]) -> dict[int, int]:
    """Return the most micro-batches in flight of each stage of a rank: from their forward to their backward.

    Args:
        actions: What the rank computes, in order, as torch writes it.
    """
    now, most = Counter[int](), Counter[int]()
    for kind, stage, _ in (part for text in actions for part in _parts(text)):
        now[stage] += (kind == "F") - (kind in "BI")
        most[stage] = max(most[stage], now[stage])
    return dict(most)


def most_deferred(actions: Sequence[str], sizes: Mapping[int, int]) -> int:
    """Return the most bytes that wait for weight gradients on a rank at once.

    Args:
        actions: What the rank computes, in order, as torch writes it.
        sizes: The bytes that a micro-batch of each stage keeps from its backward until then.
    """
    now = most = 0
    for kind, stage, _ in (part for text in actions for part in _parts(text)):
        most = max(most, now + sizes[stage] * (kind in "BI"))
        now += sizes[stage] * ((kind == "I") - (kind == "W"))
    return most


def bubble_share(slots: Sequence[Slot]) -> float:
    """Return the share of all ranks' time in which they wait, from the first action to the last, 0 to 1."""
    ranks, seconds = {slot.rank for slot in slots}, max(slot.end for slot in slots)
    return 1 - sum(slot.end - slot.start for slot in slots) / (len(ranks) * seconds)


def _parts(text: str) -> list[_Part]:
    return [(kind, int(stage), int(batch)) for stage, kind, batch in _ACTION.findall(text)]


def _needs(part: _Part, stages: int) -> list[_Part]:
    kind, stage, batch = part
    if kind == "F":
        return [("F", stage - 1, batch)] if stage else []
    if kind == "W":
        return [("I", stage, batch)]
    own = [("F", stage, batch)]
    return own if stage == stages - 1 else [*own, ("I", stage + 1, batch)]

"""A random training program: what each rank does in each step, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Ways in which ranks can run different things. A program draws none, one or two of them.
PARTINGS = (
    "head",
    "expert",
    "tower",
    "depth",
    "repeats",
    "order",
    "skipped backward",
    "micro-batches",
    "steps",
    "crash",
    "evaluation",
    "extra forward",
    "caught exception",
)
# How a micro-batch takes its gradients; see `play.take_gradients`.
WAYS = ("twice", "apart", "inside", "asked for")
# What a forward can be told to run, and with which values; those of "expert" depend on the model.
_CHOICES = {"head": (0, 2), "expert": (0, 2), "tower": (0, 2), "depth": (1, 3), "repeats": (1, 3)}


@dataclass(frozen=True)
class Call:
    """One forward of the model.

    Attributes:
        head: Index of the head.
        expert: Index of the expert, for models that have experts.
        tower: Whether the optional branch runs.
        depth: Number of blocks that run before the head.
        repeats: Number of times that each block runs.
        raises: Whether the forward raises, before its head.
    """

    head: int = 0
    expert: int = 0
    tower: bool = False
    depth: int = 2
    repeats: int = 1
    raises: bool = False


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    Attributes:
        calls: One forward, or two whose losses are added before one backward.
        does: "train", "forward" (without a backward) or "evaluate" (without gradients).
        fails: Whether the loss raises after the forward; the program catches it.
        way: "once": one backward of the sum; or one of `WAYS`.
    """

    calls: tuple[Call, ...]
    does: str = "train"
    fails: bool = False
    way: str = "once"


@dataclass(frozen=True)
class Step:
    """One step of one rank.

    Attributes:
        batches: Its micro-batches.
        end: "step", or how the step is given up: "zero_grad", "discard".
        crashes: Whether the rank's program ends with an exception of its own after the first micro-batch.
    """

    batches: tuple[Batch, ...]
    end: str = "step"
    crashes: bool = False


@dataclass(frozen=True)
class Program:
    """A model, how it is partitioned and compiled, and the steps of each rank.

    Attributes:
        seed: The number from which all was drawn.
        stage: ZeRO stage.
        compiles: "no", "whole" (the model) or "parts" (each block, head and expert).
        keep_whole_below: Argument of `partition`.
        accumulates: Whether all micro-batches of a step but the last run in `accumulate`.
        width: Features between blocks.
        outputs: Outputs of each head.
        experts: Number of experts.
        breaks: Whether a graph break stands before the head.
        bias: Whether layers have a bias.
        frozen: Whether the first block is not trained.
        optimizer: "sgd" or "adamw".
        clips: Whether gradients are clipped before each optimizer step.
        parts: The ways in which ranks run different things.
        ranks: The steps of each rank.
    """

    seed: int
    stage: int
    compiles: str
    keep_whole_below: int
    accumulates: bool
    width: int
    outputs: tuple[int, int]
    experts: int
    breaks: bool
    bias: bool
    frozen: bool
    optimizer: str
    clips: bool
    parts: tuple[str, ...]
    ranks: tuple[tuple[Step, ...], ...]

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def must_be_right(self) -> bool:
        """Return True if no error is justified: ranks run the same, and updates come after a last backward."""
        steps = [step for step in self.ranks[0] if step.end == "step"]
        last = [[batch for batch in step.batches if batch.does != "evaluate"][-1] for step in steps]
        return not self.parts and all(_trains(batch) for batch in last)

    @property
    def kind(self) -> str:
        """Return the group in which the program is counted."""
        return f"stage {self.stage}, {'uncompiled' if self.compiles == 'no' else 'compiled'}"

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.world} ranks, stage {self.stage}, compiles {self.compiles}"]
        names = (
            "keep_whole_below",
            "accumulates",
            "width",
            "outputs",
            "experts",
            "breaks",
            "bias",
            "frozen",
            "optimizer",
        )
        lines.append("  " + ", ".join(f"{name}={getattr(self, name)}" for name in (*names, "clips")))
        lines.append(f"  ranks differ in: {', '.join(self.parts) or 'nothing'}")
        for number in range(max(map(len, self.ranks))):
            steps = [steps[number] if number < len(steps) else None for steps in self.ranks]
            if all(step == steps[0] for step in steps):
                lines.append(f"  step {number}, all ranks: {_text(steps[0])}")
            else:
                lines += [f"  step {number}, rank {rank}: {_text(step)}" for rank, step in enumerate(steps)]
        return "\n".join(lines)


def draw(seed: int) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    compiles = rng.choice(("no", "no", "no", "whole", "whole", "parts"))
    model = {
        "width": rng.choice((6, 8, 12)),
        "outputs": rng.choice(((4, 4), (4, 4), (3, 5))),
        "experts": rng.choice((0, 2, 3)),
        "breaks": rng.random() < 0.2,
        "bias": rng.random() < 0.25,
        "frozen": rng.random() < 0.2,
    }
    experts = int(model["experts"])
    # Few different ones: each is a graph of its own, and ranks should part in graphs that are known.
    calls = [_draw_call(rng, experts) for _ in range(rng.choice((1, 2, 2)))]
    shared = tuple(_draw_step(rng, calls) for _ in range(rng.choice((2, 3, 3, 4))))
    parts: tuple[str, ...] = ()
    if rng.random() < 0.6:
        choices = [each for each in PARTINGS if each != "expert" or experts]
        parts = tuple(rng.sample(choices, rng.choice((1, 1, 2))))
    ranks = [shared] * rng.choice((2, 2, 3))
    for part in parts:
        ranks = _part(rng, part, ranks, experts)
    return Program(
        seed=seed,
        stage=rng.randrange(4),
        compiles=compiles,
        keep_whole_below=rng.choice((0, 0, 20, 16384)),
        accumulates=rng.random() < 0.6,
        optimizer=rng.choice(("sgd", "adamw")),
        clips=rng.random() < 0.15,
        parts=parts,
        ranks=tuple(ranks),
        **model,  # type: ignore[arg-type]
    )


def _draw_step(rng: random.Random, calls: Sequence[Call]) -> Step:
    batches = [_draw_batch(rng, calls) for _ in range(rng.choice((1, 1, 2, 3)))]
    if rng.random() < 0.1:
        batches.insert(rng.randrange(len(batches) + 1), replace(batches[0], does="evaluate", fails=False))
    if rng.random() > 0.1:
        return Step(tuple(batches))
    if rng.random() < 0.7:  # a step is mostly given up because a micro-batch has failed
        batches[-1] = replace(batches[-1], fails=True)
    return Step(tuple(batches), rng.choice(("zero_grad", "discard")))


def _draw_batch(rng: random.Random, choices: Sequence[Call]) -> Batch:
    calls = tuple(rng.choice(choices) for _ in range(2 if rng.random() < 0.12 else 1))
    does = "forward" if rng.random() < 0.06 else "train"
    way = rng.choice(WAYS) if rng.random() < 0.35 else "once"
    if rng.random() < 0.06:
        if rng.random() < 0.5:
            return Batch(calls, fails=True, way=way)
        calls = (*calls[:-1], replace(calls[-1], raises=True))
    return Batch(calls, does, way=way)


def _draw_call(rng: random.Random, experts: int) -> Call:
    return Call(
        head=int(rng.random() < 0.3),
        expert=rng.randrange(experts) if experts else 0,
        tower=rng.random() < 0.3,
        depth=rng.choice((2, 2, 2, 1)),
        repeats=rng.choice((1, 1, 1, 2)),
    )


def _part(rng: random.Random, part: str, ranks: list[tuple[Step, ...]], experts: int) -> list[tuple[Step, ...]]:
    """Make ranks differ in one way, from some step on."""
    first = rng.randrange(max(map(len, ranks)))
    if part in _CHOICES:
        values = range(*_CHOICES[part]) if part != "expert" else range(experts)
        warm_up = rng.random() < 0.6  # all ranks run each of them first, so that ranks part in graphs that all know
        return [
            (
                *steps[:first],
                *(_with(steps[first], part, value) for value in values for _ in range(warm_up) if steps[first:]),
                *(_with(step, part, values[(rank + i) % len(values)]) for i, step in enumerate(steps[first:])),
            )
            for rank, steps in enumerate(ranks)
        ]
    alone = rng.randrange(len(ranks))  # the rank that does something else
    steps = list(ranks[alone])
    at = min(first, len(steps) - 1)
    steps[at : at + 1] = _otherwise(rng, part, steps[at])
    if part == "steps" or (part == "crash" and rng.random() < 0.5):
        del steps[max(1, at + (part == "crash")) :]
    return [tuple(steps) if rank == alone else each for rank, each in enumerate(ranks)]


def _otherwise(rng: random.Random, part: str, step: Step) -> list[Step]:
    """The step of the one rank that differs; none if the rank has ended before."""
    batches = list(step.batches)
    which = rng.randrange(len(batches))
    batch = batches[which]
    if part == "order":
        other = replace(batch.calls[0], head=1 - batch.calls[0].head)
        batches[which] = replace(batch, calls=(other, *batch.calls[:1]))
    elif part == "skipped backward":
        batches[which] = replace(batch, does="forward")
    elif part == "micro-batches":
        if len(batches) > 1 and rng.random() < 0.5:
            del batches[which]
        else:
            batches.insert(which, replace(batch, fails=False))
    elif part == "evaluation":
        batches.insert(rng.choice((0, len(batches))), Batch(batch.calls[:1], "evaluate"))
    elif part == "extra forward":
        batches.insert(which, Batch(batch.calls[:1], "forward"))
    elif part == "caught exception":
        if rng.random() < 0.5:
            batches[which] = replace(batch, fails=True)
        else:
            batches[which] = replace(batch, calls=(*batch.calls[:-1], replace(batch.calls[-1], raises=True)))
    return [replace(step, batches=tuple(batches), crashes=part == "crash")]


def _with(step: Step, name: str, value: int) -> Step:
    """The step, in which each forward has another value."""
    changed = [
        replace(
            batch,
            calls=tuple(replace(call, **{name: bool(value) if name == "tower" else value}) for call in batch.calls),
        )
        for batch in step.batches
    ]
    return replace(step, batches=tuple(changed))


def _trains(batch: Batch) -> bool:
    return batch.does == "train" and not batch.fails and not any(call.raises for call in batch.calls)


def _text(step: Step | None) -> str:
    if step is None:
        return "has ended"
    said = [
        f"{batch.does}{' (the loss raises)' * batch.fails}{f' {batch.way}' * (batch.way != 'once')} "
        + " + ".join(
            f"head {call.head} expert {call.expert} depth {call.depth}"
            + " tower" * call.tower
            + f" x{call.repeats}" * (call.repeats > 1)
            + " raises" * call.raises
            for call in batch.calls
        )
        for batch in step.batches
    ]
    return "; ".join(said) + f"; {step.end}" + ", crashes after the first micro-batch" * step.crashes

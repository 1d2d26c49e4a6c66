"""The memory of a training step: forwards, backwards and the optimizer, from the memory of their graphs.

A step goes like this; its caller holds parameters, gathered copies, optimizer state, buffers and the batch.

    refresh        gathered copies are gathered in place
    forward 0..n   one per captured graph; adds saved values for the backward, and passes its outputs to the next
    backward n..0  each frees the values that its forward saved, and leaves gradients
    optimizer      gradients beside parameters and state; it is assumed to need nothing else, like fused ones
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from .block_memory import BlockMemory, PlanMemory
from .budget import StageNeeds
from .pair_memory import PairMemory
from .pieces import MemoryKind, Piece
from .states import OPTIMIZER_STATES, below_bytes, held_bytes, state_bytes

# Parts of memory at the peak, in the order in which they are printed.
PARTS = ("parameters", "optimizer state", "gradients", "saved for backward", "communication", "other")

AROUND = "code around blocks"
OTHER_BLOCKS = "other blocks"
"""Further parts, of steps with blocks."""


@dataclass(frozen=True)
class PhaseMemory:
    """The peak of one part of a step.

    Attributes:
        name: "refresh", "forward 0", "backward 0", "optimizer".
        node: The node at the peak; empty outside graphs.
        composition: Its bytes by `PARTS`.
    """

    name: str
    node: str
    composition: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """The most bytes alive at once."""
        return sum(self.composition.values())


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step.

    Attributes:
        phases: Its phases, in order.
        below: "host" or "disk" -> bytes stored there all the time, by `PARTS`.
        buffers: Peak bytes of buffers outside the device's allocator for transfers to and from disk. Phases do not
            include them.
    """

    phases: tuple[PhaseMemory, ...]
    below: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    buffers: int = 0

    @property
    def at_peak(self) -> PhaseMemory:
        """The (first) phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return self.at_peak.bytes


def simulate_step(
    pairs: Sequence[PairMemory],
    *,
    optimizer_state: int = OPTIMIZER_STATES,
    keeps_outputs: bool = False,
    other_bytes: int = 0,
    held: Mapping[str, int] = MappingProxyType({}),
    blocks: Sequence[BlockMemory | None] = (),
    gathers_ahead: bool = True,
) -> StepMemory:
    """Return the memory of a step that runs the given graphs, one after the other, and then the optimizer.

    Gradients are set to None before each step, and there is no accumulation. An input with the size of an earlier
    graph's output is assumed to be that output.

    Args:
        pairs: The captured graphs of the model's forward, in the order in which they run.
        optimizer_state: Number of tensors of the shape of its shard that the optimizer keeps for each trained
            parameter.
        keeps_outputs: True if the program keeps all outputs of the model, such as logits, instead of only the loss:
            during the backward, and during the next forward, because `out = model(batch)` frees the old outputs when it
            has new ones.
        other_bytes: Bytes of the program's other tensors.
        held: Purpose -> further bytes that are in memory during the complete step.
        blocks: For each pair, its repeated block, which a plan gathers; None for the others. Default: there are none.
        gathers_ahead: See `PlanMemory`.
    """
    plan = PlanMemory(blocks or [None] * len(pairs), gathers_ahead=gathers_ahead)
    return _Step(pairs, optimizer_state, keeps_outputs, {"other": other_bytes, **held}, blocks, plan).result()


def simulate_runs(pair: PairMemory, needs: StageNeeds) -> StepMemory:
    """Return the memory of a step in which several runs share one graph.

    In the backward each block frees its values and leaves its gradients, so a step of blocks takes most at one of both
    ends, or while the code around the blocks runs.

    Args:
        pair: The memory of the graph.
        needs: What a step needs besides one run.
    """
    waiting = (needs.in_flight - 1) * pair.waiting_bytes
    name = OTHER_BLOCKS if needs.is_block else "micro-batches in flight"
    first = simulate_step([pair], keeps_outputs=True, held={**needs.held, name: waiting})
    if not needs.is_block:
        return first
    at_end = {**needs.held, "gradients": needs.held["gradients"] + needs.gradients}
    last = simulate_step([pair], keeps_outputs=True, held=at_end)
    begin, end = ({**step.phases[0].composition, AROUND: 0} for step in (first, last))
    around = (
        PhaseMemory("the code between blocks", "", begin | {name: waiting + pair.waiting_bytes, AROUND: needs.between}),
        PhaseMemory("the code before blocks", "", end | {AROUND: needs.before}),
    )
    return replace(first, phases=(*first.phases, *last.phases, *around))


class _Step:
    """The phases of a step, one after the other, with the values that are alive between them."""

    def __init__(
        self,
        pairs: Sequence[PairMemory],
        optimizer_state: int,
        keeps_outputs: bool,
        held: Mapping[str, int],
        blocks: Sequence[BlockMemory | None],
        plan: PlanMemory,
    ) -> None:
        self._pairs = pairs
        self._blocks = blocks
        self._plan = plan
        self._keeps_outputs = keeps_outputs
        params = {info.name: info for pair in pairs for info in (*pair.unread, *pair.params.values())}
        copies = {name: pair.copy_bytes[node] for pair in pairs for node, name in pair.gathered_copies.items()}
        unread_copies = max((pair.unread_copies for pair in pairs), default=0)
        self._parameters = sum(map(held_bytes, params.values())) + sum(copies.values()) + unread_copies
        self._state = sum(state_bytes(info, optimizer_state) for info in params.values())
        self._below = below_bytes(params.values(), optimizer_state)
        self._held, self._inputs = held, 0
        self._saved = [pair.forward.bytes_of(pair.saved) for pair in pairs]
        self._outputs = [pair.forward.bytes_of(pair.outputs - pair.saved) for pair in pairs]
        self._kept = [0] * len(pairs)  # outputs of earlier graphs that a graph's backward reads
        self._gradients: dict[str, int] = {}  # of the backwards that are over, by parameter
        self._hand_over()

    def result(self) -> StepMemory:
        numbers = range(len(self._pairs))
        phases = [self._phase("refresh")]
        phases += [self._forward(number) for number in numbers]
        phases += [self._backward(number) for number in reversed(numbers) if self._pairs[number].backward is not None]
        phases.append(self._phase("optimizer", gradients=sum(self._gradients.values())))
        buffers = max((size for pair in self._pairs for size in pair.buffers), default=0)
        return StepMemory(tuple(phases), self._below, buffers)

    def _hand_over(self) -> None:
        """Distinguish, by size, inputs that graphs get from one another from those that the caller provides."""
        handed: list[tuple[int, bool]] = []  # what no later graph has taken yet: bytes, and whether it is saved
        for number, pair in enumerate(self._pairs):
            for piece in pair.forward.pieces:
                of_parameter = (pair.params, pair.gathered_copies, pair.block_inputs)
                if not piece.owned or any(piece.node in known for known in of_parameter):
                    continue
                taken = next((item for item in handed if item[0] == piece.bytes), None)
                if taken is None:
                    self._inputs += piece.bytes
                    continue
                handed.remove(taken)
                if piece.node in pair.read_again and not taken[1]:
                    self._kept[number] += piece.bytes
            handed += [(pair.forward.bytes_of([name]), name in pair.saved) for name in pair.outputs]

    def _forward(self, number: int) -> PhaseMemory:
        pair = self._pairs[number]
        alive = [piece for piece in pair.forward.alive_at(pair.forward.peak_index) if not piece.owned]
        saved = [piece for piece in alive if piece.node in pair.saved]
        travelling = [piece for piece in alive if piece.kind is MemoryKind.COMMUNICATION and piece not in saved]
        return self._phase(
            f"forward {number}",
            node=pair.forward.peak_node,
            saved=sum(self._saved[:number]) + _bytes(saved),
            communication=_bytes(travelling) + self._plan.forward(number),
            other=sum(self._outputs[:number])
            + self._keeps_outputs * self._outputs[-1]  # of the step before
            + _bytes(alive)
            - _bytes(saved)
            - _bytes(travelling),
        )

    def _backward(self, number: int) -> PhaseMemory:
        pair = self._pairs[number]
        memory = pair.backward
        assert memory is not None
        alive = [piece for piece in memory.alive_at(memory.peak_index) if not piece.owned]
        saved = [p for p in alive if p.kind is MemoryKind.INPUT and p.node in pair.forward.roots]
        produced = [piece for piece in alive if piece.node in pair.gradients.values()]
        travelling = [piece for piece in alive if piece.kind is MemoryKind.COMMUNICATION]
        phase = self._phase(
            f"backward {number}",
            node=memory.peak_node,
            gradients=sum(self._gradients.values()) + _bytes(produced),
            saved=sum(self._saved[:number]) + sum(self._kept[: number + 1]) + _bytes(saved),
            communication=_bytes(travelling) + self._plan.backward(number),
            other=self._keeps_outputs * self._outputs[-1]
            + _bytes(alive)
            - _bytes(saved)
            - _bytes(produced)
            - _bytes(travelling),
        )
        for piece in dict.fromkeys(pair.gradients.values()):  # small ones may lie in one piece
            names = [name for name, where in pair.gradients.items() if where == piece]
            if not any(name in self._gradients for name in names):  # otherwise it is added to one that is there
                self._gradients |= {**dict.fromkeys(names, 0), names[0]: memory.bytes_of([piece])}
        block = self._blocks[number] if self._blocks else None
        if block is not None:
            self._gradients[f"block {block.name}"] = block.gradients
        return phase

    def _phase(
        self,
        name: str,
        *,
        node: str = "",
        gradients: int = 0,
        saved: int = 0,
        communication: int = 0,
        other: int = 0,
    ) -> PhaseMemory:
        parts = (self._parameters, self._state, gradients, saved, communication, self._inputs + other)
        found = dict(zip(PARTS, parts, strict=True))
        return PhaseMemory(name, node, found | {part: size + found.get(part, 0) for part, size in self._held.items()})


def _bytes(pieces: Iterable[Piece]) -> int:
    return sum(piece.bytes for piece in pieces)

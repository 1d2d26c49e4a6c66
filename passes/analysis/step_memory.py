"""The memory of a training step: forwards, backwards and the optimizer, from the memory of their graphs.

A step goes like this; its caller holds parameters, gathered copies, optimizer state, buffers and the batch.

    refresh        gathered copies are gathered in place
    forward 0..n   one per captured graph; adds saved values for the backward, and passes its outputs to the next
    backward n..0  each frees the values that its forward saved, and leaves gradients
    optimizer      gradients beside parameters and state; it is assumed to need nothing else, like fused ones
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor
from torch.fx import GraphModule

from dsgraph.inductor_ext import chunk_rows
from dsgraph.passes.compat import captured_gradients, captured_input, is_tangent
from dsgraph.passes.ir.graph import fake_value, placeholders
from dsgraph.passes.ir.mesh_axis import MeshAxis, shard_axis
from dsgraph.passes.ir.parameters import ParameterSpec
from dsgraph.passes.ir.roles import GraphInput, InputRole

from .memory import simulate
from .pieces import GraphMemory, MemoryKind, Piece
from .sizes import tensor_bytes
from .states import OPTIMIZER_STATES, below_bytes, held_bytes, state_bytes
from .transfer_buffers import StoredGradient, stored_gradients, transfer_buffers

# Parts of memory at the peak, in the order in which they are printed.
PARTS = ("parameters", "optimizer state", "gradients", "saved for backward", "communication", "other")


@dataclass(frozen=True)
class PairMemory:
    """The memory of one captured graph.

    Attributes:
        forward: Memory of its forward.
        backward: Memory of its backward; None if nothing needs a gradient.
        params: Input of the forward -> parameter.
        gathered_copies: Inputs of the forward that are gathered copies of parameters -> the parameter's name.
        gradients: Parameter's name -> the piece of the backward that holds its gradient.
        saved: Pieces that the forward allocates and the backward reads.
        read_again: Inputs of the forward that the backward reads as well, as pieces.
        outputs: Pieces that the forward allocates and returns to its caller.
        copy_bytes: Bytes of gathered copies: equally many rows of each rank, some of which may be padding.
        unread: Parameters of the model that the graph does not read, which the step still keeps in memory.
        unread_copies: Bytes of their gathered copies.
        keeps_outputs: True if the caller is assumed to keep the model's outputs, which `saved` does not include then.
        buffers: For each graph, the peak bytes of buffers for parameters on disk and their gradients.
        stores: Moments of the backward, by input of the forward, when gradients of parameters on disk are stored.
        random_states: The states of random number generators among `saved`.
    """

    forward: GraphMemory
    backward: GraphMemory | None
    params: Mapping[str, ParameterSpec]
    gathered_copies: Mapping[str, str]
    gradients: Mapping[str, str]
    saved: frozenset[str]
    read_again: frozenset[str]
    outputs: frozenset[str]
    copy_bytes: Mapping[str, int]
    unread: tuple[ParameterSpec, ...] = ()
    unread_copies: int = 0
    keeps_outputs: bool = False
    buffers: tuple[int, ...] = ()
    stores: tuple[StoredGradient, ...] = ()
    random_states: frozenset[str] = frozenset()


def pair_memory(
    forward: GraphModule,
    backward: GraphModule | None,
    *,
    params: Mapping[str, ParameterSpec],
    roles: Mapping[str, GraphInput],
    axes: Sequence[MeshAxis],
    fused: bool = False,
    keeps_outputs: bool = False,
    unread: tuple[ParameterSpec, ...] = (),
    unread_copies: int = 0,
) -> PairMemory:
    """Return the memory of a captured graph, from its graphs as the code generator gets them.

    Args:
        forward: The graph after the passes of the forward phase.
        backward: The graph after the passes of the backward phase; None if nothing needs a gradient.
        params: Placeholders of the forward -> parameters, see `PassContext`.
        roles: Placeholders of the forward -> their roles, see `PassContext`.
        axes: Axes of the mesh.
        fused: For Inductor, see `simulate`.
        keeps_outputs: True if the caller keeps the model's outputs, such as logits, during the backward, even if the
            backward reads them and would free them.
        unread: See `PairMemory`.
        unread_copies: See `PairMemory`.
    """
    ahead = simulate(forward, owned=[node.name for node in placeholders(forward)], fused=fused)
    held = {piece.node for piece in ahead.pieces if piece.owned}
    saved = _saved(backward, ahead) if backward is not None else {}
    roots = {name: ahead.roots[source][0] for name, source in saved.items() if source in ahead.roots}
    # A forward returns what the captured graph returns, and then what it saves.
    returned = ahead.outputs[: len(ahead.outputs) - len(saved)]
    outputs = {piece for name in returned if name is not None for piece in ahead.roots.get(name, ())}
    gathered_copies = _gathered_copies(roles, params)
    behind, gradients = None, dict[str, str]()
    lasting = held | outputs if keeps_outputs else held
    if backward is not None:
        behind = simulate(
            backward, owned=[name for name, root in roots.items() if root in lasting], roots=roots, fused=fused
        )
        gradients = _gradients(forward, backward, behind, params)
    return PairMemory(
        forward=ahead,
        backward=behind,
        params=dict(params),
        gathered_copies=gathered_copies,
        gradients=gradients,
        saved=frozenset(roots.values()) - lasting,
        read_again=frozenset(roots.values()) & held,
        outputs=frozenset(outputs - held),
        copy_bytes=_copy_bytes(gathered_copies, forward, params, axes),
        unread=unread,
        unread_copies=unread_copies,
        keeps_outputs=keeps_outputs,
        buffers=tuple(map(transfer_buffers, [forward] if backward is None else [forward, backward])),
        stores=() if backward is None else stored_gradients(backward),
        random_states=frozenset(roots[name] for name, source in saved.items() if name != source and name in roots),
    )


def _saved(backward: GraphModule, ahead: GraphMemory) -> dict[str, str]:
    """Return the backward's inputs that the forward returns, each with the node of the forward that it comes from.

    They have the same names, but for the states of random number generators, which have the same order.
    """
    known = set(ahead.nodes)
    inputs = [node for node in placeholders(backward) if not is_tangent(node)]
    found = {node.name: node.name for node in inputs if node.name in known}
    states = [node.name for node in inputs if node.name not in known and isinstance(node.meta.get("val"), Tensor)]
    behind = ahead.outputs[len(ahead.outputs) - len(found) - len(states) :]
    sources = [name for name in behind if name is not None and name not in found]
    return {**found, **dict(zip(states, sources, strict=True))} if len(sources) == len(states) else found


def _gradients(
    forward: GraphModule, backward: GraphModule, memory: GraphMemory, params: Mapping[str, ParameterSpec]
) -> dict[str, str]:
    names = {captured_input(node): params[node.name].name for node in placeholders(forward) if node.name in params}
    (output,) = backward.graph.find_nodes(op="output")
    found: dict[str, str] = {}
    for position, origin in captured_gradients(output).items():
        node = memory.outputs[position]
        if origin in names and node is not None and node in memory.roots:
            found.setdefault(names[origin], memory.roots[node][0])
    return found


def _gathered_copies(roles: Mapping[str, GraphInput], params: Mapping[str, ParameterSpec]) -> dict[str, str]:
    """Return the gathered copies, by input; under `accumulate` a graph may read copies without their shards."""
    split = {info.name for info in params.values() if info.placement == "shard"}
    copies = {node: item.parameter for node, item in roles.items() if item.role is InputRole.GATHERED_COPY}
    return {node: parameter for node, parameter in copies.items() if parameter in split}


def _copy_bytes(
    gathered_copies: Mapping[str, str],
    forward: GraphModule,
    params: Mapping[str, ParameterSpec],
    axes: Sequence[MeshAxis],
) -> dict[str, int]:
    copies = {node.name: fake_value(node) for node in placeholders(forward) if node.name in gathered_copies}
    rows_of = {info.name: info.shape[0] for info in params.values() if info.placement == "shard"}
    axis = shard_axis(axes)
    world = axis.size if axis is not None else 1
    return {
        node: tensor_bytes(copies[node]) // rows_of[name] * chunk_rows(rows_of[name], world) * world
        for node, name in gathered_copies.items()
    }


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
    """
    return _Step(pairs, optimizer_state, keeps_outputs, {"other": other_bytes, **held}).result()


class _Step:
    """The phases of a step, one after the other, with the values that are alive between them."""

    def __init__(
        self, pairs: Sequence[PairMemory], optimizer_state: int, keeps_outputs: bool, held: Mapping[str, int]
    ) -> None:
        self._pairs = pairs
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
                if not piece.owned or piece.node in pair.params or piece.node in pair.gathered_copies:
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
            communication=_bytes(travelling),
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
            communication=_bytes(travelling),
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

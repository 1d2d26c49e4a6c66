"""The memory of a captured graph: its forward, its backward, and what passes from one to the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from dsgraph.inductor_ext import chunk_rows
from dsgraph.passes.compat import captured_gradients, captured_input, is_tangent
from dsgraph.passes.ir.graph import fake_value, placeholders
from dsgraph.passes.ir.parameters import GraphInput, InputRole, MeshAxis, ParameterSpec, shard_axis

from .memory import simulate
from .pieces import GraphMemory
from .sizes import tensor_bytes
from .transfer_buffers import StoredGradient, stored_gradients, transfer_buffers


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
        block_inputs: Inputs of the forward that are full parameters, which the graph of the step gathers.
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
    block_inputs: frozenset[str] = frozenset()

    @property
    def waiting_bytes(self) -> int:
        """The bytes that a run leaves between its forward and its backward."""
        return self.forward.bytes_of(self.saved | self.outputs)


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
    block_inputs: frozenset[str] = frozenset(),
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
        block_inputs: See `PairMemory`.
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
        block_inputs=block_inputs,
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

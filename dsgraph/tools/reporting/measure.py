"""Measurements of the graphs of a compile for the report, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.compat.inductor import runs_as_it_is
from dsgraph.compiler.frames import SourceLine, user_line
from dsgraph.passes import CaptureFacts, PassContext, Phase
from dsgraph.passes.analysis.pair_memory import PairMemory, pair_memory
from dsgraph.passes.compat import OpOverload, captured_input, is_tangent
from dsgraph.passes.core.notes import parameter_behind
from dsgraph.passes.ir.coalesced import collective_behind, is_result
from dsgraph.passes.ir.collectives import is_collective, is_gather
from dsgraph.passes.ir.graph import is_arrival, is_view, is_wait, placeholders

from .traffic import Traffic, graph_traffic, nbytes

aten = torch.ops.aten

_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_RECOMPUTE = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
# Ops of these are torch's or dsgraph's own: where Inductor has no lowering, none was expected.
_OWN_OPS = frozenset({"aten", "prims", "inductor_prims", "_c10d_functional", "dsgraph"})


@dataclass(frozen=True)
class LoweredGraph:
    """A forward or a backward graph after all passes.

    Attributes:
        phase: "forward" or "backward".
        nodes: How many nodes it has.
        traffic: What it sends each time it runs.
    """

    phase: str
    nodes: int
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True)
class IgnoredTag:
    """A value of a checkpoint region that is kept for the backward though the region asks to recompute it."""

    name: str
    place: SourceLine | None
    saved_bytes: int | None


@dataclass(frozen=True)
class Activations:
    """The values that the backward reads from the forward, and those that it recomputes.

    Bytes; None if a size is unknown.

    Attributes:
        saved: Values that are kept for the backward and are neither inputs, views of them, nor gathered parameters.
        saved_bytes: Their bytes.
        kept_parameters: Gathered parameters that are kept.
        kept_names: Their names.
        kept_parameter_bytes: Their bytes.
        recomputed: Forward nodes that the backward graph repeats, views and gathers left out.
        recomputed_bytes: Bytes of their results.
        gathered_again: Parameters that the backward gathers again.
        gathered_again_bytes: Their bytes at full size.
    """

    saved: int = 0
    saved_bytes: int | None = 0
    kept_parameters: int = 0
    kept_names: tuple[str, ...] = ()
    kept_parameter_bytes: int | None = 0
    recomputed: int = 0
    recomputed_bytes: int | None = 0
    gathered_again: int = 0
    gathered_again_bytes: int | None = 0


@dataclass
class Measurements:
    """Collects what one compile's graphs hold, phase by phase.

    Attributes:
        facts: Facts of the graph that is compiled.
        with_inductor: Whether Inductor will compile the graphs, so that ops without a lowering count.
        in_step: True if gradients are enabled, so that a training step runs the graph.
        graphs: Those that have been through their passes.
        activations: What passes from forward to backward; None before the backward graph exists, or without one.
        memory: Of the two graphs; None before the backward graph exists, or without one.
        ignored_tags: Where a checkpoint region was not honoured.
        unlowered: Op -> calls, for ops that Inductor runs as they are.
    """

    facts: CaptureFacts
    with_inductor: bool
    in_step: bool
    graphs: list[LoweredGraph] = field(default_factory=list)
    activations: Activations | None = None
    memory: PairMemory | None = None
    ignored_tags: tuple[IgnoredTag, ...] = ()
    unlowered: Counter[str] = field(default_factory=Counter)
    _tagged: dict[str, SourceLine | None] = field(default_factory=dict)
    _forward: dict[str, tuple[object, bool, bool]] = field(default_factory=dict)
    _forward_graph: tuple[GraphModule, PassContext] | None = None

    def take_regions(self, joint: GraphModule) -> None:
        """Read the checkpoint regions of a joint graph, before any pass."""
        self._tagged = dict(_tags_of_regions(joint))

    def take(self, gm: GraphModule, ctx: PassContext) -> None:
        """Read a graph that has been through the passes of a phase."""
        phase = ctx.phase
        if phase not in (Phase.FORWARD, Phase.BACKWARD):
            return
        self.graphs.append(LoweredGraph(phase.value, len(gm.graph.nodes), graph_traffic(gm, self.facts.axes)))
        if self.with_inductor:
            self.unlowered.update(_unlowered(gm))
        if phase is Phase.FORWARD:
            self._forward = {node.name: _seen_from_backward(node) for node in gm.graph.nodes if not is_result(node)}
            self._forward_graph = None if ctx.inference else (gm, ctx)  # until the backward is there
            if ctx.inference and self.in_step and not self.facts.is_step:
                self.memory = self._memory(gm, None, ctx)
        else:
            assert self._forward_graph is not None
            forward, its_ctx = self._forward_graph
            self.activations = self._activations(gm, forward, its_ctx)
            if not self.facts.is_step:
                self.memory = self._memory(forward, gm, its_ctx)
            self._forward_graph = None
            self.ignored_tags = tuple(
                IgnoredTag(node.name, self._tagged[node.name], nbytes(node.meta.get("val")))
                for node in _saved_values(gm)
                if node.name in self._tagged
            )

    def _memory(self, forward: GraphModule, backward: GraphModule | None, ctx: PassContext) -> PairMemory:
        facts = self.facts
        read = (node for node in placeholders(forward) if captured_input(node) in facts.block_params)
        return pair_memory(
            forward,
            backward,
            params=ctx.params,
            roles=ctx.roles,
            axes=ctx.axes,
            fused=self.with_inductor,
            keeps_outputs=facts.keeps_limit,
            unread=facts.unread,
            unread_copies=facts.unread_copies,
            block_inputs=frozenset(node.name for node in read),
        )

    def _activations(self, backward: GraphModule, forward: GraphModule, ctx: PassContext) -> Activations:
        saved: list[Node] = []
        kept: list[Node] = []
        repeated: list[Node] = []
        gathered: list[Node] = []
        for node in _saved_values(backward):
            _, is_input, is_parameter = self._forward.get(node.name, (None, True, False))
            if not is_input and isinstance(node.meta.get("val"), torch.Tensor):
                (kept if is_parameter else saved).append(node)
        # Results of buckets, which passes add to either graph, may have the names of other things in the other.
        for node in (node for node in backward.graph.nodes if not is_result(node)):
            target, _, is_parameter = self._forward.get(node.name, (None, True, False))
            if node.op != "call_function" or node.target is not target or is_view(node) or is_collective(node):
                continue
            (gathered if is_wait(node) and is_parameter else repeated).append(node)
        by_name = {node.name: node for node in forward.graph.nodes}
        behind = [parameter_behind(by_name[node.name], ctx) for node in kept]
        return Activations(
            saved=len(saved),
            saved_bytes=_sum(saved),
            kept_parameters=len(kept),
            kept_names=tuple(info.name for info in behind if info is not None),
            kept_parameter_bytes=_sum(kept),
            recomputed=len(repeated),
            recomputed_bytes=_sum(repeated),
            gathered_again=len(gathered),
            gathered_again_bytes=_sum(gathered),
        )


def is_own_op(op: str) -> bool:
    """Return whether an op is torch's or dsgraph's."""
    return op.partition("::")[0] in _OWN_OPS


def _saved_values(backward: GraphModule) -> list[Node]:
    return [node for node in placeholders(backward) if not is_tangent(node)]


def _sum(nodes: Iterable[Node]) -> int | None:
    amounts = [nbytes(node.meta.get("val")) for node in nodes]
    return None if None in amounts else sum(amount for amount in amounts if amount is not None)


def _seen_from_backward(node: Node) -> tuple[object, bool, bool]:
    """Return the target, whether it is an input or shares an input's memory, and whether it is a gathered parameter."""
    source = node
    while source.op == "call_function" and (is_view(source) or is_arrival(source)):
        source = source.all_input_nodes[0]
    is_input = source.op == "placeholder"
    while source.op == "call_function" and (is_view(source) or source.target in _CASTS):
        source = source.all_input_nodes[0]
    return node.target, is_input, is_wait(source) and is_gather(collective_behind(source))


def _tags_of_regions(joint: GraphModule) -> Iterator[tuple[str, SourceLine | None]]:
    """Yield the values that checkpoint regions ask to recompute, less those that one region hands to the next."""
    for node in joint.graph.nodes:
        region = node.meta.get("ac_graph_id")
        if region is None or node.meta.get("recompute") not in _RECOMPUTE:
            continue
        if all(user.meta.get("ac_graph_id", region) <= region for user in node.users):
            yield node.name, user_line(node.stack_trace)


def _unlowered(gm: GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_wait(node):
            continue
        if not is_collective(node) and not is_view(node) and runs_as_it_is(node.target):
            yield node.target.name()

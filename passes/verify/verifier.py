"""The verifier: rules that a graph must meet after every pass, whatever the pass does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_aggregate

from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass
from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.gathers import is_unit
from dsgraph.passes.ir.graph import find_calls, placeholders

from . import collectives as invariants_collectives
from . import gathered_copies as invariants_copies
from . import memory as invariants_memory
from . import reductions as invariants_reductions
from . import transfers as invariants_transfers
from .collectives import CollectiveFacts, Violation
from .gathered_copies import CopyFacts
from .memory import MemoryFacts
from .reductions import Histories

_NO_MARKERS = "zero-collectives"


@dataclass(frozen=True)
class GraphFacts:
    """The facts of a graph at one moment.

    Attributes:
        inputs: Names of the placeholders, in order, each with the fake value it stands for.
        outputs: The results of the graph, in order: nodes and constants.
        values: Fake values of `outputs`; None for a constant.
        aliases: For each output the names of the inputs that it may share memory with; a constant stands for itself.
        unknown_values: Calls without a fake value.
        memory: The sharing of memory. Only for ATen graphs, as all following attributes.
        collectives: Collectives and markers.
        reductions: For each output that is a gradient, the groups over which it is summed.
        gathered_copies: The gathered copies that it waits for.
        transfers: Rules on transfers that this graph breaks.
        units: The runs of units in the graph of a step, each with the values that it gets from others.
    """

    inputs: tuple[tuple[str, object], ...]
    outputs: tuple[object, ...]
    values: tuple[object, ...]
    aliases: tuple[object, ...]
    unknown_values: frozenset[Node] = frozenset()
    memory: MemoryFacts = field(default_factory=MemoryFacts)
    collectives: CollectiveFacts = field(default_factory=CollectiveFacts)
    reductions: tuple[Histories, ...] = ()
    gathered_copies: CopyFacts = field(default_factory=CopyFacts)
    transfers: tuple[Violation, ...] = ()
    units: tuple[str, ...] = ()

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The rules that the graph breaks by itself, whatever it was before."""
        released = (
            (
                f"released {node.name}",
                f"{node.name} reads memory that {by.name} gave back; release a tensor after the last use of all its "
                "views",
            )
            for node, by in self.memory.released
        )
        return (*self.collectives.violations, *self.gathered_copies.violations, *self.transfers, *released)


def observe(gm: GraphModule, ctx: PassContext) -> GraphFacts:
    """Return the facts of one graph, in O(number of nodes); the same ones if it has not changed."""
    _, facts = ctx.analyses.once(("facts", id(ctx)), gm, lambda: (ctx, _observe(gm, ctx)))
    return facts


def _observe(gm: GraphModule, ctx: PassContext) -> GraphFacts:
    outputs = _output_values(gm)
    inputs = tuple((node.name, node.meta.get("val")) for node in placeholders(gm))
    values = tuple(value.meta.get("val") if isinstance(value, Node) else None for value in outputs)
    if ctx.phase is Phase.CAPTURE:  # torch functions: what they share and write is not known
        aliases = tuple(_input_name(value) if isinstance(value, Node) else value for value in outputs)
        return GraphFacts(inputs=inputs, outputs=tuple(outputs), values=values, aliases=aliases)
    memory = ctx.analyses.get(invariants_memory.observe, gm)
    return GraphFacts(
        inputs=inputs,
        outputs=tuple(outputs),
        values=values,
        aliases=tuple(_aliases(value, memory) for value in outputs),
        unknown_values=frozenset(n for n in gm.graph.nodes if n.op == "call_function" and "val" not in n.meta),
        memory=memory,
        collectives=invariants_collectives.observe(gm, memory, outputs, ctx),
        reductions=invariants_reductions.observe(gm, outputs, ctx),
        gathered_copies=invariants_copies.observe(gm, ctx),
        transfers=tuple(invariants_transfers.wrong_transfers(gm, memory)),
        units=tuple(f"{n.name}({', '.join(map(str, n.args[1]))})" for n in gm.graph.nodes if is_unit(n)),
    )


@dataclass
class Verifier:
    """A verifier of the graphs of one compile, pass by pass.

    Rules that a graph breaks before the first pass belong to the model itself, and are ignored.
    """

    _before: GraphFacts | None = None
    _known: set[str] = field(default_factory=set)
    _joint_reductions: tuple[Histories, ...] = ()
    _has_no_markers: bool = False

    def begin(self, gm: GraphModule, ctx: PassContext) -> None:
        """Record a graph before the first pass of its phase.

        Raises:
            PassError: The partitioner has made a graph that breaks a rule.
        """
        facts = self._note(observe(gm, ctx), ctx)
        if ctx.phase in (Phase.CAPTURE, Phase.JOINT) or ctx.inference:
            self._known.update(key for key, _ in facts.violations)
            return
        self.check_violations(facts, "the partitioner")
        if ctx.phase is Phase.BACKWARD and len(facts.reductions) <= len(self._joint_reductions):
            gradients = self._joint_reductions[len(self._joint_reductions) - len(facts.reductions) :]
            invariants_reductions.check(gradients, facts.reductions, "the partitioner", ctx)

    def check(self, gm: GraphModule, graph_pass: GraphPass, ctx: PassContext) -> None:
        """Compare a graph with its state before the pass that has just run.

        Raises:
            PassError: An invariant broke; the message names the pass, the node, and what was expected.
        """
        before, after = self._before, observe(gm, ctx)
        assert before is not None, "begin comes first"
        who = f"pass {graph_pass.name}"
        check_interface(before, after, who)
        if ctx.phase is not Phase.CAPTURE:
            self.check_violations(after, who)
            invariants_collectives.check(before.collectives, after.collectives, graph_pass, after.memory)
            invariants_reductions.check(before.reductions, after.reductions, who, ctx)
            invariants_memory.check(before.memory, after.memory, who)
            invariants_copies.check(before.gathered_copies, after.gathered_copies, who)
            self.check_markers(gm, graph_pass)
        self._note(after, ctx)

    def end(self) -> None:
        """Release the graph, after the last pass of its phase."""
        self._before = None

    def _note(self, facts: GraphFacts, ctx: PassContext) -> GraphFacts:
        self._before = facts
        if ctx.phase is Phase.JOINT:
            self._joint_reductions = facts.reductions
        return facts

    def check_violations(self, facts: GraphFacts, who: str, *, allows_saved_gathers: bool = False) -> None:
        """Refuse a graph that breaks a rule by itself.

        Raises:
            PassError: It does, and the model itself did not.
        """
        if allows_saved_gathers:
            self._known.update(key for key, _ in facts.violations if key.startswith("saved "))
        for key, sentence in facts.violations:
            if key not in self._known:
                raise PassError(f"after {who}, {sentence}")

    def check_markers(self, gm: GraphModule, graph_pass: GraphPass) -> None:
        """Refuse markers in a graph after the pass that lowers them.

        Raises:
            PassError: There is one.
        """
        self._has_no_markers = self._has_no_markers or _NO_MARKERS in graph_pass.provides
        if not self._has_no_markers:
            return
        ops = torch.ops.dsgraph
        for target in (ops.gather_param.default, ops.reduce_grad.default, ops.reduce_compressed.default):
            for node in find_calls(gm, target):
                raise PassError(
                    f"after pass {graph_pass.name}, marker {node.name} ({target}) is in the graph, though "
                    f"{_NO_MARKERS!r} is provided; a pass that provides it lowers every marker, and none comes later"
                )


def check_interface(before: GraphFacts, after: GraphFacts, who: str) -> None:
    """Compare the inputs and outputs of a graph before and after a pass.

    Raises:
        PassError: Inputs or outputs have changed.
    """
    was, now = ([name for name, _ in facts.inputs] for facts in (before, after))
    if was != now:
        raise PassError(
            f"{who} changed the graph's inputs from {was} to {now}; a pass must leave placeholders as they are"
        )
    for (name, old), (_, new) in zip(before.inputs, after.inputs, strict=True):
        if not is_like(old, new):
            raise PassError(
                f"{who} changed input {name!r} from {describe_value(old)} to {describe_value(new)}; a pass must leave "
                "placeholders as they are"
            )
    for run in sorted(set(after.units).difference(before.units)):  # dead ones may go
        raise PassError(
            f"{who} made the run {run} of a unit; units and the values between them are the model's: change "
            "parameters, gradients or collectives"
        )
    if len(before.outputs) != len(after.outputs):
        raise PassError(
            f"{who} changed the number of outputs from {len(before.outputs)} to {len(after.outputs)}; "
            "the graph's caller counts on each at its place"
        )
    for node in after.unknown_values - before.unknown_values:
        raise PassError(
            f"{who} left node {node.name} ({node.target}) without meta['val'], the fake value that later passes and "
            "the code generator read; make nodes by dsgraph.passes.ir.graph.emit, which computes it"
        )
    _check_outputs(before, after, who)


def _check_outputs(before: GraphFacts, after: GraphFacts, who: str) -> None:
    nodes = after.memory
    for index, (old, new) in enumerate(zip(before.outputs, after.outputs, strict=True)):
        was, now = before.aliases[index], after.aliases[index]
        if was != now:
            raise PassError(
                f"{who} changed output {index}, which was {_describe_alias(was)}, to {_describe_alias(now)}; "
                "an output that is an input, a view of one or a constant must stay so, and no other may become one: "
                "clone it"
            )
        if old is not new and old in nodes and new in before.outputs:
            other = before.outputs.index(new)
            raise PassError(
                f"{who} made output {index} of {new}, which is output {other}, though {old} is still in the graph; "
                "outputs must keep their order"
            )
        if not is_like(before.values[index], after.values[index]):
            raise PassError(
                f"{who} changed output {index} from {describe_value(before.values[index])} to "
                f"{describe_value(after.values[index])}; outputs keep shape, dtype and device"
            )


def _output_values(gm: GraphModule) -> list[object]:
    output = next(iter(gm.graph.find_nodes(op="output")))
    values: list[object] = []
    map_aggregate(output.args[0], lambda value: values.append(value))
    return values


def _input_name(node: Node) -> str | None:
    return node.name if node.op == "placeholder" else None


def _aliases(value: object, memory: MemoryFacts) -> object:
    if not isinstance(value, Node):
        return value
    return frozenset(root.name for root in memory.roots(value) if root.op == "placeholder")


def _describe_alias(alias: object) -> str:
    if alias == frozenset():
        return "a tensor of its own"
    if isinstance(alias, frozenset):
        return " or ".join(repr(name) for name in sorted(alias))
    return "not an input" if alias is None else repr(alias)


def is_like(was: Any, now: Any) -> bool:
    """Return whether two fake values have the same shape, dtype and device, as far as sizes are known."""
    if was is now or not isinstance(was, torch.Tensor):
        return True
    if not isinstance(now, torch.Tensor):
        return False
    if was.dtype != now.dtype or was.device != now.device or was.dim() != now.dim():
        return False
    return all(_may_be_equal(a, b) for a, b in zip(was.shape, now.shape, strict=True))


def _may_be_equal(was: Any, now: Any) -> bool:
    if isinstance(was, int) and isinstance(now, int):
        return was == now
    return not statically_known_true(was != now)


def describe_value(value: object) -> str:
    """Describe a fake value by dtype, shape and device."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    return f"{type(value).__name__}"

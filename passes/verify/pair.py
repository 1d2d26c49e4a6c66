"""Rules for a forward and its backward together: the values that cross, by name, kind and order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dsgraph.passes.compat import kind_of_saved_value
from dsgraph.passes.core.context import PassContext
from dsgraph.passes.core.graph_pair import GraphPair
from dsgraph.passes.core.graph_pass import GraphPass
from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.graph import placeholders

from . import collectives as invariants_collectives
from . import gathered_copies as invariants_copies
from . import memory as invariants_memory
from . import reductions as invariants_reductions
from .verifier import GraphFacts, Verifier, check_interface, describe_value, is_like, observe

_HOW = "GraphPair.save and GraphPair.drop change both graphs"


@dataclass
class PairVerifier:
    """A verifier of the two graphs of one compile, pass by pass.

    Attributes:
        verifier: The verifier of single graphs; violations of the model itself are ignored here as well.
    """

    verifier: Verifier
    _before: tuple[GraphFacts, GraphFacts] | None = None
    _own_inputs: tuple[str, ...] = ()  # of the backward: gradients and the like
    _names: Mapping[str, str] = field(default_factory=dict)  # of values that had two names from the first

    def begin(self, pair: GraphPair, ctx: PassContext) -> None:
        """Record a pair before the first pass.

        Raises:
            PassError: The partitioner has made a graph that breaks a rule.
        """
        names = [node.name for node in placeholders(pair.backward)]
        self._own_inputs = tuple(names[len(pair.saved) :])
        self._names = {ours.name: theirs.name for ours, theirs in pair.crossing() if ours.name != theirs.name}
        self._before = self._observe(pair, ctx)
        for facts in self._before:
            self.verifier.check_violations(facts, "the partitioner")

    def check(self, pair: GraphPair, graph_pass: GraphPass, ctx: PassContext) -> None:
        """Compare a pair with its state before the pass that has just run.

        Raises:
            PassError: An invariant broke; the message names the pass, the node, and what was expected.
        """
        assert self._before is not None, "begin comes first"
        who = f"pass {graph_pass.name}"
        self._check_crossing(pair, who)
        after = self._observe(pair, ctx)
        for (gm, part), before, now in zip(pair.parts(ctx), self._before, after, strict=True):
            check_interface(self._lasting(before, part), self._lasting(now, part), f"{who} ({part.part})")
            self.verifier.check_violations(now, who, allows_saved_gathers=graph_pass.keeps_gathers)
            was = before.collectives
            if graph_pass.keeps_gathers and part.part == "backward":  # what crosses is not gathered again
                was = replace(
                    was, gathers={name: was.gathers[name] for name in was.gathers if name in now.collectives.gathers}
                )
            invariants_collectives.check(was, now.collectives, graph_pass, now.memory)
            invariants_memory.check(before.memory, now.memory, who)
            invariants_copies.check(before.gathered_copies, now.gathered_copies, who)
            self.verifier.check_markers(gm, graph_pass)
        invariants_reductions.check(self._before[1].reductions, after[1].reductions, who, ctx)
        self._before = after

    def end(self) -> None:
        """Release both graphs."""
        self._before = None

    def _observe(self, pair: GraphPair, ctx: PassContext) -> tuple[GraphFacts, GraphFacts]:
        forward, backward = (observe(gm, part) for gm, part in pair.parts(ctx))
        return forward, backward

    def _lasting(self, facts: GraphFacts, ctx: PassContext) -> GraphFacts:
        """Return the facts without those of the pair: the forward's saved outputs, the backward's saved inputs."""
        if ctx.part == "backward":
            return replace(facts, inputs=tuple(item for item in facts.inputs if item[0] in self._own_inputs))
        count = ctx.user_outputs
        return replace(facts, outputs=facts.outputs[:count], values=facts.values[:count], aliases=facts.aliases[:count])

    def _check_crossing(self, pair: GraphPair, who: str) -> None:
        inputs = [node for node in placeholders(pair.backward) if node.name not in self._own_inputs]
        given, taken = [self._names.get(node.name, node.name) for node in pair.expected], [node.name for node in inputs]
        for name in taken:
            if name not in given:
                raise PassError(f"{who}: the backward reads {name}, which the forward does not save; {_HOW}")
        for name in given:
            if name not in taken:
                raise PassError(f"{who}: the forward saves {name}, which the backward does not take; {_HOW}")
        for ours, theirs in zip(given, taken, strict=False):
            if ours != theirs:
                raise PassError(
                    f"{who}: the backward takes {theirs} where the forward saves {ours}; values cross by their places, "
                    "which must be the same in both graphs"
                )
        if len(given) != len(taken):
            raise PassError(f"{who}: the forward saves {len(given)} values, of which the backward takes {len(taken)}")
        if [node.name for node in placeholders(pair.backward)] != [*taken, *self._own_inputs]:
            raise PassError(
                f"{who}: the backward's inputs {self._own_inputs} must come after the saved values, in order"
            )
        if pair.saved != sorted(pair.saved, key=kind_of_saved_value):
            raise PassError(f"{who}: the forward must return saved tensors, then opaque objects, then sizes")
        for node, taken_as in zip(pair.expected, inputs, strict=True):
            was, now = node.meta.get("val"), taken_as.meta.get("val")
            if not is_like(was, now):
                raise PassError(
                    f"{who}: the forward saves {node.name} as {describe_value(was)}, and the backward takes it as "
                    f"{describe_value(now)}; both are one tensor"
                )

"""The objects that call the passes in a code generator: one for training graphs, one for inference graphs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule
from typing_extensions import Self

from dsgraph.passes.analysis.budget import MemoryBudget, MemoryPart
from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.analysis.pair_memory import pair_memory
from dsgraph.passes.analysis.step_memory import StepMemory, simulate_runs, simulate_step
from dsgraph.passes.compat import (
    CustomGraphPass,
    CustomPartitionerFn,
    captured_input,
    is_tangent,
    put_opaque_values_last,
)
from dsgraph.passes.core.capture_facts import CaptureFacts
from dsgraph.passes.core.context import Phase
from dsgraph.passes.core.graph_pair import GraphPair
from dsgraph.passes.core.graph_pass import source_fingerprint
from dsgraph.passes.ir.accumulated_grads import write_accumulated_grads
from dsgraph.passes.ir.coalesced import results_of
from dsgraph.passes.ir.collectives import collectives
from dsgraph.passes.ir.graph import emit, is_returned, is_wait, placeholders, replace_and_erase
from dsgraph.passes.ir.random_calls import evaluate_random_calls
from dsgraph.passes.memory.fit import PLANNED, Agree, alone, describe, fit
from dsgraph.passes.memory.policies import TransferPolicy
from dsgraph.passes.memory.scratch import copy_graph, split_by_min_cut

from .runner import PassRecord, Runner

_FAR_APART = 2**26
"""Bytes of a transfer for which the latency is negligible."""


class Split(Protocol):
    """A function that splits a joint graph into a forward and a backward.

    The conventions are those of torch's partitioners: placeholders keep their names; the forward returns the joint
    graph's first `num_fwd_outputs` outputs, then saved values; the backward takes saved sizes, then all other saved
    values under their names in the forward, and then the tangents.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Return the forward and the backward graph of a joint graph.

        It is called with the graph and its inputs, and by name with `num_fwd_outputs` and further arguments of
        AOTAutograd.
        """


class _HeldByReference:
    """A value of Inductor's configuration: copied by reference, and pickled into cache keys as its identity."""

    def __init__(self, runner: Runner, facts: CaptureFacts) -> None:
        self._runner = runner
        self._facts = facts

    def uuid(self) -> object | None:
        """Return an identifier of passes, options and facts for torch's cache keys."""
        return _identity(self._runner, self._facts)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[tuple[object, ...]], tuple[tuple[object, ...]]]:
        return tuple, ((type(self).__name__, self.uuid()),)


class Partitioner(_HeldByReference, CustomPartitionerFn):
    """The partitioner: joint passes, the split, then passes of both graphs, of the forward, of the backward.

    Inductor takes it as `custom_partitioner_fn`, AOTAutograd as `partition_fn`, so that every code generator runs
    exactly the same passes.
    """

    def __init__(
        self,
        runner: Runner,
        facts: CaptureFacts,
        *,
        split: Split = split_by_min_cut,
        agree: Agree = alone,
    ) -> None:
        super().__init__(runner, facts)
        self._split = split
        self._agree = agree  # on how a memory limit is kept
        self.step_peak: int | None = None  # of a step that keeps one

    def uuid(self) -> object | None:
        known = super().uuid()
        stage = self._facts.stage
        if self._facts.keeps_limit and (self._agree is not alone or (stage is not None and stage.is_block)):
            return None  # what other ranks need is in no key, and a cache does not know what a block leaves
        if known is None or self._split is split_by_min_cut:
            return known
        # The contents of a closure or an object cannot be hashed reliably.
        holds = getattr(self._split, "__closure__", self._split)
        code = None if holds else source_fingerprint(self._split, repr(getattr(self._split, "__defaults__", None)))
        return None if code is None else (known, code)

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Return the forward and the backward graph of a joint graph."""
        if write_accumulated_grads(gm):
            gm.recompile()
        budget = self._facts.budget()
        self._runner.run(gm, self._facts.context(gm, Phase.JOINT, budget=budget))
        forward, backward = self._parts(gm, joint_inputs, budget, kwargs)
        self._finish(forward, backward, kwargs["num_fwd_outputs"], budget, self._runner)
        self._runner.end()
        return forward, backward

    def _finish(
        self, forward: GraphModule, backward: GraphModule, user_outputs: int, budget: MemoryBudget, runner: Runner
    ) -> None:
        """Run the passes after the split: those of both graphs, of the forward, of the backward."""
        for part in (forward, backward):
            evaluate_random_calls(part)
            _merge_waits(part)
        put_opaque_values_last(forward, backward, num_fwd_outputs=user_outputs)
        pair = GraphPair(forward, backward, user_outputs)
        runner.run(pair, self._facts.pair_context(pair, budget=budget))
        context = partial(self._facts.context, budget=budget)
        runner.run(forward, context(forward, Phase.FORWARD, user_outputs=user_outputs))
        runner.run(backward, context(backward, Phase.BACKWARD))

    def _transfers(self, costs: CostModel) -> TransferPolicy | None:
        tier = self._facts.offload_tier
        if tier is None:
            return None
        seconds = costs.tier_seconds(tier, _FAR_APART) / _FAR_APART
        return TransferPolicy(tier, seconds, hide=tier == "disk" or self._facts.device_type != "cpu")

    def _simulate(
        self, pair: tuple[GraphModule, GraphModule], *, budget: MemoryBudget, user_outputs: int
    ) -> StepMemory:
        """Return the memory of a step with both graphs of a split, which are not changed."""
        facts, (ahead, behind) = self._facts, map(copy_graph, pair)
        self._finish(ahead, behind, user_outputs, deepcopy(budget), Runner(self._runner.pipeline, verify=False))
        known = facts.context(ahead, Phase.FORWARD, budget=budget)
        full = (node.name for node in placeholders(ahead) if captured_input(node) in facts.block_params)
        found = pair_memory(
            ahead,
            behind,
            params=known.params,
            roles=known.roles,
            axes=facts.axes,
            fused=facts.fuses,
            keeps_outputs=True,
            unread=facts.unread,
            unread_copies=facts.unread_copies,
            block_inputs=frozenset(full),
        )
        if facts.stage is not None:
            return simulate_runs(found, facts.stage)
        return simulate_step([found], keeps_outputs=True, held={"other": facts.held_gradients})

    def _parts(
        self, gm: GraphModule, joint_inputs: Sequence[object], budget: MemoryBudget, how: dict[str, Any]
    ) -> tuple[GraphModule, GraphModule]:
        """Split the joint graph, under the memory limit if one must be kept."""
        facts, limit = self._facts, self._facts.memory_limit
        if not facts.keeps_limit or limit is None:
            return self._split(gm, joint_inputs, **how)
        started, ctx = time.perf_counter(), facts.context(gm, Phase.JOINT, budget=budget)

        pair, found = fit(
            gm,
            joint_inputs,
            split=self._split,
            limit=limit,
            measure=partial(self._simulate, budget=budget, user_outputs=how["num_fwd_outputs"]),
            held=sum(budget.needs[part] for part in (MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER_STATE)),
            costs=ctx.costs,
            fuses=facts.fuses,
            transfers=self._transfers(ctx.costs),
            in_flight=1 if facts.stage is None else facts.stage.in_flight,
            agree=self._agree,
            **how,
        )
        self.step_peak = found.peak
        done, notes = describe(found, limit)
        seconds = time.perf_counter() - started
        found.save_plan(gm).write(gm)
        nodes = len(gm.graph.nodes)
        record = PassRecord(PLANNED, Phase.JOINT, len(found.repeated), notes, done, seconds, nodes, nodes)
        self._runner.note(gm, ctx, record)
        return pair


class InferenceLowering(_HeldByReference, CustomGraphPass):
    """The joint and forward passes for a graph without a backward, which no partitioner ever sees.

    Inductor calls it for joint graphs of training as well, which it leaves to the partitioner, and for branches of
    `torch.cond` and the like, whose inputs are none of the captured graph: passes rewrite them with the outer graph.
    """

    def __call__(self, graph: Graph) -> None:
        """Rewrite an inference graph in place."""
        gm = graph.owning_module
        inputs = graph.find_nodes(op="placeholder")
        is_branch = bool(inputs) and all(captured_input(node) is None for node in inputs)
        if gm is None or is_branch or any(map(is_tangent, inputs)):
            return
        budget = self._facts.budget()
        for phase in (Phase.JOINT, Phase.FORWARD):
            self._runner.run(gm, self._facts.context(gm, phase, inference=True, budget=budget))
        self._runner.end()


def _merge_waits(gm: GraphModule) -> None:
    """Leave only one wait for each collective.

    If a parameter is gathered twice, once in a checkpoint region and once as a result, the split merges the two
    gathers, but not waits whose memory the graph returns.
    """
    merged = 0
    for result in (result for started in collectives(gm) for result in results_of(started)):
        first, *others = sorted(filter(is_wait, result.users)) or [result]
        for wait in others:
            both = is_returned(first) and is_returned(wait)  # by the model, which may write to one of them
            replace_and_erase(wait, emit(wait, torch.ops.aten.clone.default, first) if both else first)
            merged += 1
    if merged:
        gm.recompile()


def _identity(runner: Runner, facts: CaptureFacts) -> object | None:
    prints = runner.pipeline.fingerprint()
    if prints is None:
        return None
    params, gathered_copies = sorted(facts.params.items()), sorted(facts.gathered_copies)
    known = (facts.axes, params, sorted(facts.roles.items()), gathered_copies, facts.costs, facts.device_type)
    return (
        "dsgraph",
        source_hash(),
        prints,
        repr((*known, facts.memory_limit, facts.keep_bytes, *_kept(facts))),
    )


def _kept(facts: CaptureFacts) -> tuple[object, ...]:
    """Return the facts, besides the graph, on which a plan depends; scratch memory depends on the threads."""
    counted = (facts.unread, facts.unread_copies, facts.held_gradients, facts.stage, torch.get_num_threads())
    return (facts.keeps_limit, facts.offload_tier, *(counted if facts.keeps_limit else ()))


@cache
def source_hash() -> str:
    """Return a hash of every source file of the compiler and of the ops, for torch's cache keys."""
    here = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in (here, here.parent / "inductor_ext"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()

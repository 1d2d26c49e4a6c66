"""The plan of a step: the passes of a model, over the graph of its units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.flop_counter import FlopCounterMode

from dsgraph.compat.autograd import has_hooks
from dsgraph.partitioning.classes import plain_class
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import PartitionState, held_by
from dsgraph.partitioning.step.step_graph import JointStep, joint_graph
from dsgraph.partitioning.step.step_plan import AT_ONCE, StepPlan
from dsgraph.partitioning.step.step_program import lower
from dsgraph.partitioning.step.step_record import StepRecord, StepUnit, Work
from dsgraph.passes import CaptureFacts, GraphInput, InferenceLowering, InputRole, Partitioner, Runner
from dsgraph.passes.analysis.sizes import tensor_bytes
from dsgraph.passes.core.notes import origin
from dsgraph.passes.ir.graph import is_wait
from dsgraph.passes.ir.save_plan import Choice, must
from dsgraph.passes.memory.scratch import on_scratch
from dsgraph.passes.memory.split_as_planned import split_as_planned
from dsgraph.ranks.agreement import Agreement, Agreements
from dsgraph.utils.json_records import from_json_text, to_json_text

from .build_pipeline import build_pipeline
from .costs.agreed import known_costs
from .fake_run import on_fakes
from .frames import Capture, SourceLine
from .options import BackendOptions
from .request import CompileObserver, CompileOutcome, CompileRequest, Watches

PlanStep = Callable[..., StepPlan]
"""`Backend.plan_step`."""


def run_as_unit(compiled: Callable[..., Any], request: CompileRequest, plan_step: PlanStep) -> Callable[..., Any]:
    """Return a compiled graph as a unit of the step, if it reads full parameters that stand for shards."""
    numbers = [number for number, value in enumerate(request.inputs) if hasattr(value, "dsgraph_entry")]
    if not numbers:
        return compiled
    block, options = request.unit.shared_name(request.unit.block), request.options
    unit = StepUnit(block or request.function, block, request.work)
    of_step = options.model_copy(update={"codegen": "eager"})  # no code is generated for its graph

    def run(*args: Any) -> Any:
        state = _state_of(args[numbers[0]])
        if state.step.compiled_with != of_step:
            state.step.drop()
            state.step.compiled_with, state.step.gathers_ahead = of_step, options.overlap_comm
            state.step.plans.make, state.step.plans.at_once = partial(plan_step, state, options=of_step), AT_ONCE
        return state.step.run_unit(unit, numbers, compiled, args)

    return run


def _state_of(stand_in: Any) -> PartitionState:
    module, _ = stand_in.dsgraph_entry.owners[0]
    return held_by(module).partition


def plan_step(
    state: PartitionState,
    record: StepRecord,
    options: BackendOptions,
    *,
    number: int,
    observers: Sequence[CompileObserver],
    agreements: Agreements,
) -> StepPlan:
    """Return the plan of a recorded step, which observers see like a compile. All ranks call it at the same point.

    Args:
        state: The model.
        record: The step.
        options: The options with which its graphs were compiled.
        number: Number among the compiles of this process.
        observers: Those of the backend.
        agreements: Those of the backend.

    Raises:
        RanksDisagreeError: The ranks would run different collectives.
    """
    with torch.set_grad_enabled(bool(record.backward)), on_scratch():
        agreement, signature = agreements.over(state.parameter_mesh), record.signature
        alone, record = _without_differences(agreement, state, record)
        request, joint = _request(state, options, record, number=number, agreement=agreement)
        watch = Watches([observer.begin(request) for observer in observers])
        runner = Runner(request.pipeline, sink=watch, after_phase=watch.after_phase, verify=options.verify)
        inputs = [node.name for node in joint.gm.graph.find_nodes(op="placeholder")]
        shards = dict(zip(inputs, joint.entries, strict=False))
        copies = dict(zip(inputs[len(shards) :], joint.copies, strict=False))
        backward, kept = None, dict[str, ParameterState]()
        if record.backward:
            partitioner = Partitioner(runner, request.facts, split=_split)
            ahead, behind = partitioner(joint.gm, [], num_fwd_outputs=joint.results)
            taken = {node.name for node in behind.graph.find_nodes(op="placeholder")}
            kept = {
                node.name: shards[origin(node).name]
                for node in ahead.graph.nodes
                if node.name in taken and is_wait(node) and origin(node).name in shards
            }
            forward = lower(ahead, keep=taken, shards=shards)
            backward = lower(behind, gradients=range(len(joint.gradients)), shards=shards)
        else:
            InferenceLowering(runner, request.facts)(joint.gm.graph)
            forward = lower(joint.gm, shards=shards)
        agreement.confirm("run different steps", runner.orders)
        watch.finished(CompileOutcome(tuple(runner.records)))
    return StepPlan(record, joint.gradients, shards, copies, kept, alone, signature, forward, backward)


def _request(
    state: PartitionState, options: BackendOptions, record: StepRecord, *, number: int, agreement: Agreement
) -> tuple[CompileRequest, JointStep]:
    """Return a step as observers of compiles see it, and its graph."""
    mesh = state.parameter_mesh
    known = known_costs(agreement, mesh.device_type)
    costs = known.model(mesh, state.axes)

    def seconds(work: Work) -> float:  # kernels of a unit multiply, or move memory, one after the other
        dtype = getattr(torch, work.dtype)
        return costs.kernel_seconds(work.operations, 0, dtype=dtype) + costs.kernel_seconds(0, work.moved)

    joint = joint_graph(record, seconds)
    names = enumerate(entry.name for entry in joint.entries)
    facts = CaptureFacts(
        axes=state.axes,
        params={number: entry.current_spec() for number, entry in enumerate(joint.entries)},
        roles={number: GraphInput(InputRole.SHARD, name, model_name=name) for number, name in names},
        costs=costs,
        device_type=mesh.device_type,
        keep_bytes=state.step.limit.spare,
        keeps_limit=state.step.limit.is_kept,
        is_step=True,
    )
    code = plain_class(state.root).forward.__code__
    function = SourceLine(code.co_filename, code.co_firstlineno, f"step of {type(state.root).__name__}")
    request = CompileRequest(
        number=number,
        options=options,
        pipeline=build_pipeline(options, facts),
        mode=None,
        capture=Capture(function),
        module=state.root,
        # No parameter, because a log would keep its owners.
        inputs=(torch.empty(0, requires_grad=bool(record.backward)),),
        facts=facts,
        costs=known.describe(mesh, state.axes),
        agreement=agreement,
        reads_held=bool(record.held),
    )
    return request, joint


@dataclass(frozen=True)
class _RankDifferences:
    """The differences between ranks that a plan must not depend on.

    Attributes:
        hooked: Names of the parameters that have hooks.
        work: The work of each call, which depends on the rank's batch.
    """

    hooked: tuple[str, ...]
    work: tuple[Work, ...]


def _without_differences(
    agreement: Agreement, state: PartitionState, record: StepRecord
) -> tuple[frozenset[ParameterState], StepRecord]:
    """Return the parameters with hooks on any rank, and the record without them, with the work of the first rank."""
    hooked = tuple(entry.name for entry in state.parameters if has_hooks(entry.param))
    own = _RankDifferences(hooked, tuple(call.unit.work for call in record.calls))
    found = agreement.exchange("which parameters have hooks", to_json_text(own))
    ranks = [from_json_text(_RankDifferences, found[rank]) for rank in sorted(found)]
    watched = {name for rank in ranks for name in rank.hooked}
    alone = frozenset(entry for entry in state.parameters if entry.name in watched)
    return alone, record.without(alone).timed(ranks[0].work)


def _split(gm: GraphModule, _: Sequence[Any], *, num_fwd_outputs: int, **__: Any) -> tuple[GraphModule, GraphModule]:
    """Split the joint graph of a step: what is gathered is gathered again, unless a pass keeps it."""
    repeated = {node.name for node in gm.graph.nodes if must(node, Choice.RECOMPUTE)}
    saved = {node.name for node in gm.graph.nodes if node.op == "call_function"} - repeated
    found = split_as_planned(gm, saved=saved, repeated=repeated, outputs=num_fwd_outputs)
    assert found is not None, "the graph of a step has only static sizes and pure nodes"
    return found


def work_of(gm: GraphModule, inputs: Sequence[Any]) -> Work:
    """Return the work of a captured graph, before passes run: a graph from torch's cache runs none."""
    counter, moved, dtypes = FlopCounterMode(display=False), [0], [torch.float32]

    class Counting(Interpreter):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and n.op.startswith("call_"):
                moved[0] += 2 * int(tensor_bytes(result))
                dtypes[0] = result.dtype
            return result

    try:
        with on_fakes(inputs) as fakes, torch.no_grad(), counter:
            Counting(gm).run(*fakes)
    except Exception:  # sizes that depend on data
        return Work()
    return Work(counter.get_total_flops(), moved[0], str(dtypes[0]).removeprefix("torch."))

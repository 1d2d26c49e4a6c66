"""The plan of a step: the passes of a model, over the graph of its units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.flop_counter import FlopCounterMode

from dsgraph.partitioning.state import PartitionState
from dsgraph.partitioning.step.step_graph import joint_graph
from dsgraph.partitioning.step.step_program import lower
from dsgraph.partitioning.step.step_record import StepRecord, Work
from dsgraph.partitioning.step.step_run import StepPlan
from dsgraph.passes import CaptureFacts, InferenceLowering, Partitioner, Pipeline, Runner
from dsgraph.passes.analysis.sizes import tensor_bytes
from dsgraph.ranks.agreement import Agreement

from .build_pipeline import build_pipeline
from .costs.agreed import known_costs
from .fake_run import on_fakes
from .options import BackendOptions


def plan_step(state: PartitionState, options: BackendOptions, record: StepRecord) -> StepPlan:
    """Return the plan of a recorded step. All ranks call it at the same point, and compare what they will run.

    Raises:
        RanksDisagreeError: The ranks would run different collectives.
    """
    mesh = state.parameter_mesh
    agreement = Agreement.over(mesh)
    costs = known_costs(agreement, mesh.device_type).model(mesh, state.axes)

    def seconds(work: Work) -> float:
        return costs.kernel_seconds(work.operations, work.moved, dtype=work.dtype)

    joint = joint_graph(record, seconds)
    facts = CaptureFacts(
        axes=state.axes,
        params={number: entry.current_spec() for number, entry in enumerate(joint.entries)},
        costs=costs,
        device_type=mesh.device_type,
        keep_bytes=state.plan.limit.spare,
    )
    pipeline = Pipeline(item for item in build_pipeline(options, facts) if item.needs_mesh)
    runner = Runner(pipeline, verify=options.verify)
    shards = {
        node.name: entry
        for node, entry in zip(joint.gm.graph.find_nodes(op="placeholder"), joint.entries, strict=False)
    }
    backward = None
    if record.backward:
        ahead, behind = Partitioner(runner, facts)(joint.gm, [], num_fwd_outputs=joint.results)
        taken = [node.name for node in behind.graph.find_nodes(op="placeholder")]
        forward = lower(ahead, keep=taken, shards=shards)
        backward = lower(behind, gradients=range(len(joint.entries)), shards=shards)
    else:
        InferenceLowering(runner, facts)(joint.gm.graph)
        forward = lower(joint.gm, shards=shards)
    agreement.confirm("run different steps", runner.orders)
    return StepPlan(record, joint.entries, shards, forward, backward)


def work_of(gm: GraphModule, inputs: Sequence[Any]) -> Work:
    """Return what a captured graph computes. A graph from torch's cache runs no pass, so it is counted before them."""
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
    return Work(counter.get_total_flops(), moved[0], dtypes[0])

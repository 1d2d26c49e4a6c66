"""`dsgraph.pipeline`: pipeline parallelism, a stage of the model on each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh
from torch.fx import Node

from dsgraph.checkpoint.weight_files import describe
from dsgraph.compat.process_groups import group_timeout
from dsgraph.compiler.costs.agreed import known_costs
from dsgraph.compiler.options import parse_options
from dsgraph.inductor_ext import resolve_group
from dsgraph.passes import CostModel
from dsgraph.passes.parallel.split_stages import SplitStages, StagePlan
from dsgraph.passes.parallel.stage_graphs import StageGraph, return_only, stage_graphs
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.equal_batches import EqualBatches
from dsgraph.ranks.mesh import axis_group, mesh_axes, mesh_ranks
from dsgraph.utils.errors import OptionError

from .captured_model import CapturedModel, capture_model
from .pipelined import PipelinedModel, PipelineReport
from .schedule_order import SCHEDULES, ZERO_BUBBLE, actions_of, check_microbatches, check_order, stages_of_ranks
from .sharded_stages import Copies, ShardedStages
from .stage_modules import LossOf, StageModule
from .stage_runs import StageRuns
from .stage_values import Materialize, own_values, share_first_values
from .tied_gradients import StepGradients


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: tuple[Any, ...],
    *,
    microbatches: int,
    example_kwargs: Mapping[str, Any] | None = None,
    schedule: str = "1F1B",
    stages: int | None = None,
    split: str | Sequence[str] = "auto",
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    materialize: Materialize | None = None,
    data_parallel: DeviceMesh | None = None,
    zero_stage: int = 0,
    keep_whole_below: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> PipelinedModel:
    """Split an unmodified model into pipeline stages.

    The stages are run by `torch.distributed.pipelining`'s schedules. All ranks of the mesh call it with the same model.

    Args:
        model: A model whose forward `torch.compile(fullgraph=True)` can capture. It may be on the meta device.
        mesh: A mesh of one dimension: the ranks of the pipeline.
        example_inputs: Positional arguments of one micro-batch.
        microbatches: Number of micro-batches of a step; at least the number of stages.
        example_kwargs: Named arguments of one micro-batch.
        schedule: "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV".
        stages: Number of stages; by default one a rank, two if the schedule supports several.
        split: "auto" balances the predicted cost; or the paths of the modules with which the second and later stages
            begin: `["layers.8"]`.
        loss_fn: `loss_fn(output, target)`, a mean over rows. By default the model returns its loss: the first scalar
            with a gradient.
        materialize: Returns the values of a parameter or buffer on the meta device, from its name and itself. Called
            only for those of this rank.
        data_parallel: A mesh of one dimension: the ranks that hold the same stages. Gradients are averaged over them
            once a step.
        zero_stage: ZeRO stage over those ranks, 0 to 3, as for `partition`. Parameters are gathered once a step, and
            gradients reduced once a step.
        keep_whole_below: As for `partition`.
        options: Options of the backend, which then compiles each stage; {} uses their defaults. None: stages run
            eagerly. Schedules that split the backward of a stage in two ("InterleavedZeroBubble", "ZBVZeroBubble",
            "DualPipeV") run eagerly only.

    Returns:
        This rank's stages.

    Raises:
        OptionError: The schedule, stages and micro-batches do not fit each other, or an option is wrong.
        PartitionError: The model cannot be captured, or writes to a buffer.
        PassError: The graph cannot be cut there.
        RanksDisagreeError: The ranks would run different pipelines.
    """
    if mesh.ndim != 1:
        raise OptionError(f'pipeline: the mesh has {mesh.ndim} dimensions: give only that of the pipeline, mesh["pp"]')
    if zero_stage and data_parallel is None:
        raise OptionError(
            f"pipeline: zero_stage is {zero_stage}, and there are no ranks to shard over: give data_parallel"
        )
    count = stages or mesh.size() * (2 if SCHEDULES.get(schedule) else 1)
    held = stages_of_ranks(schedule, ranks=mesh.size(), stages=count)
    check_microbatches(schedule, ranks=mesh.size(), stages=count, microbatches=microbatches)
    if options is not None and schedule in ZERO_BUBBLE:
        raise OptionError(
            f"pipeline: {schedule} splits the backward of a stage in two, and a compiled stage has one: "
            "leave options out, or take GPipe, 1F1B or Interleaved1F1B"
        )
    if options is not None:
        _check_options(options)
    device = _device(mesh)
    kwargs = dict(example_kwargs or {})
    agreement = _agreement(mesh)
    costs = _costs(agreement, mesh)
    captured = capture_model(model, example_inputs, kwargs=kwargs, device=device, costs=costs)
    saved = _saved(model, captured)  # before memory of other stages is freed and ZeRO shards the own ones
    return_only(captured.graph_module, result := _result(captured, loss_fn is None))
    splits = SplitStages(count, split, seconds_per_byte=_seconds_per_byte(costs))
    plan = splits.plan(captured.graph_module.graph, captured.costs, captured.repeated)
    graphs = stage_graphs(
        *(captured.graph_module, plan),
        state=captured.state,
        results=[result],
        repeated=captured.repeated,
    )
    agreement.confirm("run different pipelines", _lines(plan, schedule, microbatches=microbatches, graphs=graphs))
    group, rank = axis_group(mesh, 0), mesh.get_local_rank()
    own = own_values(graphs, held[rank], device=device, materialize=materialize)
    share_first_values(graphs, held, own, group=group, agreement=agreement)
    mine = _own_stages(graphs, held[rank], defers=schedule in ZERO_BUBBLE)
    for module in mine.values() if options is not None else ():
        module.compile_graph(options or {})
    loss = LossOf(loss_fn, microbatches)
    runs = StageRuns(captured, graphs, mine, schedule=schedule, loss=loss, group=group, device=device)
    actions = actions_of(runs.now().schedule, schedule, stages=count, microbatches=microbatches)
    check_order(actions, stages=count)
    tied = _tied(graphs)
    report = PipelineReport.of(
        plan,
        schedule=schedule,
        microbatches=microbatches,
        stages_of_ranks=tuple(map(tuple, held)),
        tied=tied,
        actions=actions,
    )
    return PipelinedModel(
        runs=runs,
        stages=mine,
        gradients=_gradients(
            captured,
            mine,
            tied=tied,
            held=held,
            mesh=mesh,
            copies=None if data_parallel is None else Copies(data_parallel, zero_stage, keep_whole_below),
        ),
        report=report,
        inputs=captured.inputs,
        example=(example_inputs, kwargs),
        loss_inside=loss_fn is None,
        device=device,
        equal=EqualBatches(agreement, _slicing_agreement(captured, device)),
        draws=captured.draws,
        **saved,
    )


def _saved(model: nn.Module, captured: CapturedModel) -> dict[str, Any]:
    """Return `sizes` and `description` of the model for `ModelTensors`."""
    passing = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    found: dict[str, torch.Size] = {}
    for name, tensor in captured.state.values():
        shape, held = list(tensor.shape), captured.slices.get(name)
        if held is not None and held.dim >= 0:
            shape[held.dim] *= held.ranks
        if name not in passing:
            found[name] = torch.Size(shape)
    return {"sizes": dict(sorted(found.items())), "description": describe(model)}


def _slicing_agreement(captured: CapturedModel, device: torch.device) -> Agreement | None:
    """Return the agreement of tensor-parallel ranks; None without tensor parallelism."""
    for held in captured.slices.values():
        group = resolve_group(held.group)
        return Agreement(tuple(dist.get_process_group_ranks(group)), group_timeout(group, device.type))
    return None


def _check_options(options: Mapping[str, Any]) -> None:
    """Check the options now: otherwise a wrong one would be an error only when the first stage is compiled."""
    if parse_options(options).memory_limit is not None:
        raise OptionError("pipeline: the option 'memory_limit' is not supported for stages yet: remove it")


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _agreement(mesh: DeviceMesh) -> Agreement:
    return Agreement(tuple(mesh_ranks(mesh)), group_timeout(axis_group(mesh, 0), mesh.device_type))


def _costs(agreement: Agreement, mesh: DeviceMesh) -> CostModel:
    """Return the costs of computing and sending: measured, or the defaults."""
    return known_costs(agreement, mesh.device_type).model(mesh, mesh_axes(mesh))


def _seconds_per_byte(costs: CostModel) -> float:
    """Return seconds per byte of the link between stages.

    Of the measured kinds an all-gather is most like a message.
    """
    (link,) = costs.links.values()
    return 1 / link.of("all_gather").bytes_per_s


def _result(captured: CapturedModel, is_loss: bool) -> Node:
    """Return the result of the last stage: the loss, or the input of `loss_fn`."""
    results = [node for node in captured.results if isinstance(node, Node)]
    if not is_loss:
        if len(results) != 1:
            raise OptionError(f"pipeline: loss_fn takes one tensor, the model returns {len(results)}")
        return results[0]
    losses = [node for node in results if node.meta["val"].ndim == 0 and node.meta["val"].requires_grad]
    if not losses:
        raise OptionError(
            "pipeline: the model returns no scalar with a gradient: give loss_fn=, or have it return its loss"
        )
    return losses[0]


def _lines(plan: StagePlan, schedule: str, *, microbatches: int, graphs: Sequence[StageGraph]) -> list[str]:
    """Return the lines that must be equal on all ranks."""
    lines = [f"{schedule}, {len(plan.stages)} stages, {microbatches} micro-batches"]
    for number, graph in enumerate(graphs):
        values = [node.meta["val"] for node in graph.sent]
        sent = [(tuple(value.shape), str(value.dtype), value.requires_grad) for value in values]
        lines.append(f"stage {number} sends {sent}, reads {graph.roots}, holds {graph.parameters}")
    return lines


def _own_stages(graphs: Sequence[StageGraph], held: Sequence[int], *, defers: bool) -> dict[int, StageModule]:
    last = len(graphs) - 1
    return {
        number: StageModule(graphs[number].module, graphs[number].roots, single=number == last, defers=defers)
        for number in held
    }


def _tied(graphs: Sequence[StageGraph]) -> dict[str, tuple[int, ...]]:
    readers: dict[str, list[int]] = {}
    for number, graph in enumerate(graphs):
        for name, _ in graph.module.named_parameters():
            readers.setdefault(name, []).append(number)
    return {name: tuple(stages) for name, stages in readers.items() if len(stages) > 1}


def _gradients(
    captured: CapturedModel,
    mine: Mapping[int, StageModule],
    *,
    tied: Mapping[str, tuple[int, ...]],
    held: Sequence[Sequence[int]],
    mesh: DeviceMesh,
    copies: Copies | None,
) -> StepGradients:
    rank_of = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    apart = {name: stages for name, stages in tied.items() if len({rank_of[stage] for stage in stages}) > 1}
    tensors = dict(captured.state.values())
    parameters = {name: value for stage in mine.values() for name, value in stage.graph_module.named_parameters()}
    return StepGradients(
        parameters,
        {name: tensors[name].detach().to("meta") for name in apart if tensors[name].requires_grad},
        frozenset(name for name, stages in apart.items() if stages[0] in mine),
        axis_group(mesh, 0),
        axis_group(copies.mesh, 0) if copies is not None else None,
        ShardedStages(parameters, copies) if copies is not None else None,
        {name: held for name, held in captured.slices.items() if name in parameters},
        _device(mesh),
    )

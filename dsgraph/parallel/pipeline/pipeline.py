"""`dsgraph.pipeline`: pipeline parallelism, a stage of the model on each rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh

from dsgraph.checkpoint.weight_files import describe
from dsgraph.compat.process_groups import group_timeout
from dsgraph.compat.tensors import map_tensors
from dsgraph.compiler.costs.agreed import known_costs
from dsgraph.compiler.options import parse_options
from dsgraph.partitioning.forward_inputs import cast_floating
from dsgraph.passes import CostModel
from dsgraph.passes.parallel.stages.split_stages import SplitStages
from dsgraph.passes.parallel.stages.stage_graphs import StageGraph, describe_stages, return_only
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.equal_batches import EqualBatches
from dsgraph.ranks.mesh import axis_group, mesh_axes, mesh_ranks
from dsgraph.utils.errors import OptionError, PartitionError

from .captured_model import CapturedModel, capture_model
from .evaluation.evaluation import Evaluation, Held
from .evaluation.generation import Generation
from .mixed_dtypes import refuse_mixed_dtypes
from .model_copy import default_device, with_values, without_values
from .pipeline_report import PipelineReport
from .pipelined import PipelinedModel
from .schedule_order import SCHEDULES, ZERO_BUBBLE, actions_of, check_microbatches, check_order, stages_of_ranks
from .sharded_stages import copies_of
from .stage_chain import NO_TECHNIQUES, StageChain, Techniques
from .stage_modules import LossOf, StageModule, result_of
from .stage_runs import StageRuns
from .stage_values import Materialize, own_values, share_first_values
from .step_arguments import StepArguments
from .tied_gradients import gradients_of_stages, tied_parameters


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
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    options: Mapping[str, Any] | None = None,
    techniques: Techniques = NO_TECHNIQUES,
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
            with a gradient. Without a loss, the result can only `evaluate`.
        materialize: Returns the values of a parameter or buffer on the meta device, from its name and itself. Called
            only for those of this rank.
        data_parallel: A mesh of one dimension: the ranks that hold the same stages. Gradients are averaged over them
            once a step.
        zero_stage: ZeRO stage over those ranks, 0 to 3, as for `partition`. Parameters are gathered once a step, and
            gradients reduced once a step.
        keep_whole_below: As for `partition`.
        param_dtype: Dtype in which stages compute, and to which floating-point inputs are cast. Parameters keep theirs,
            and gradients are accumulated in that dtype. Needs `data_parallel`, for which a mesh of one rank is enough.
        reduce_dtype: As for `partition`. Needs `data_parallel`.
        options: Options of the backend, which then compiles each stage; {} uses their defaults. None: stages run
            eagerly. `memory_limit` bounds a step of each rank.
        techniques: Changes that the engine needs.

    Returns:
        This rank's stages.

    Raises:
        OptionError: The schedule, stages and micro-batches do not fit each other, or an option is wrong.
        PartitionError: The model cannot be captured or writes to a parameter, or an argument for `partition` is wrong.
        PassError: The graph cannot be cut there.
        RanksDisagreeError: The ranks would run different pipelines.
    """
    copies = copies_of(data_parallel, zero_stage, keep_whole_below, param_dtype, reduce_dtype, techniques.offload)
    count = stages or mesh.size() * (2 if SCHEDULES.get(schedule) else 1)
    held = _checked_stages(mesh, schedule, stages=count, microbatches=microbatches, options=options)
    device, agreement, paths = _device(mesh), _agreement(mesh), techniques.paths(model, schedule, options)
    costs = _costs(agreement, mesh)
    example = cast_floating((example_inputs, dict(example_kwargs or {})), param_dtype)
    twin = _twin(model, device, param_dtype)
    is_moved = any(tensor.device != device for tensor in (*model.parameters(), *model.buffers()))
    captured = _captured(model, example, param_dtype, is_moved, device=device, costs=costs, options=options)
    _tell_unseeded(captured)
    example = map_tensors(lambda tensor: tensor.detach().to("meta"), example)  # of which only sizes are needed
    saved = _saved(model, captured)  # before memory of other stages is freed and ZeRO shards the own ones
    result = result_of(captured, is_loss=loss_fn is None)
    gm = captured.graph_module
    return_only(gm, results := captured.returned() if result is None else [result])
    splits = SplitStages(count, split, seconds_per_byte=_seconds_per_byte(costs), undivided=techniques.drops)
    plan = splits.plan(gm.graph, captured.costs, captured.repeated, captured.writes.together)
    graphs = captured.stages(plan, results)
    techniques.check(graphs)
    first = f"{schedule}, {microbatches} micro-batches, blocks {sorted(paths)}"
    agreement.confirm("run different pipelines", [first, *describe_stages(graphs)])
    group, rank = axis_group(mesh, 0), mesh.get_local_rank()
    own = own_values(graphs, held[rank], device=device, materialize=materialize)
    share_first_values(graphs, held, own, group=group, agreement=agreement)
    mine = _own_stages(graphs, held[rank], defers=schedule in ZERO_BUBBLE, paths=paths)
    for module in mine.values() if options is not None else ():
        module.compile_graph(options or {})
    loss = LossOf(loss_fn, microbatches, is_missing=result is None)
    runs = StageRuns(captured, graphs, mine, schedule=schedule, loss=loss, group=group, device=device)
    actions = actions_of(runs.now().schedule, schedule, stages=count, microbatches=microbatches)
    check_order(actions, stages=count)
    tied = tied_parameters(graphs)
    report = PipelineReport.of(
        plan, schedule=schedule, microbatches=microbatches, stages_of_ranks=held, tied=tied, actions=actions
    )
    return PipelinedModel(
        runs=runs,
        stages=mine,
        gradients=gradients_of_stages(captured, mine, tied, held=held, mesh=mesh, copies=copies, device=device),
        options=options,
        evaluation=partial(
            Evaluation,
            twin,
            example,
            is_moved=is_moved,
            result=partial(result_of, is_loss=loss_fn is None, evaluates=True),
            held=Held.of(graphs, held, group=group, device=device),
            loss=LossOf(loss_fn, microbatches),
            agreement=agreement,
            options=options,
        ),
        generation=Generation(twin, example, microbatches=microbatches),
        loss=loss,
        report=report,
        inputs=captured.inputs,
        arguments=StepArguments(
            example, captured.inputs, data_parallel, count=microbatches, loss_inside=loss_fn is None, dtype=param_dtype
        ),
        device=device,
        equal=_equal_batches(agreement, captured, device, data_parallel),
        draws=captured.draws,
        seeds=captured.seeds,
        **saved,
    )


def _checked_stages(
    mesh: DeviceMesh, schedule: str, *, stages: int, microbatches: int, options: Mapping[str, Any] | None
) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank, after checks of what was asked for."""
    if mesh.ndim != 1:
        raise OptionError(f'pipeline: the mesh has {mesh.ndim} dimensions: give only that of the pipeline, mesh["pp"]')
    held = stages_of_ranks(schedule, ranks=mesh.size(), stages=stages)
    check_microbatches(schedule, ranks=mesh.size(), stages=stages, microbatches=microbatches)
    parse_options(options)  # otherwise a wrong option would be an error only when the first stage is compiled
    return tuple(map(tuple, held))


def _twin(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module | PartitionError:
    """Return a copy of the model without values, or the error, which is raised where the copy is needed."""
    try:
        return without_values(model, device, dtype=dtype)
    except PartitionError as error:
        return error


def _captured(
    model: nn.Module,
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
    dtype: torch.dtype | None,
    is_moved: bool,
    *,
    device: torch.device,
    costs: CostModel,
    options: Mapping[str, Any] | None,
) -> CapturedModel:
    """Capture a model, or a copy without values if its parameters have another dtype or device."""
    args, kwargs = example
    if dtype is None and not is_moved:
        return capture_model(model, args, kwargs=kwargs, device=device, costs=costs, options=options)
    twin = without_values(model, device, dtype=dtype)  # not that of evaluation: a forward may leave something in it
    with default_device(device if is_moved else None):
        captured = capture_model(twin, args, kwargs=kwargs, device=device, costs=costs, options=options)
    if dtype is not None:
        refuse_mixed_dtypes(captured, dtype)
    return with_values(captured, model)


def _tell_unseeded(captured: CapturedModel) -> None:
    if captured.unseeded:
        warnings.warn(
            f"pipeline: {', '.join(captured.unseeded)} draw random numbers of each rank, so that runs in other layouts "
            "differ: use dropout, attention, rand, randn, bernoulli or their variants where layouts must not matter",
            stacklevel=3,
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


def _equal_batches(
    agreement: Agreement, captured: CapturedModel, device: torch.device, data_parallel: DeviceMesh | None
) -> EqualBatches:
    slicing = next((Agreement.of(held.group, device.type) for held in captured.slices.values()), None)
    return EqualBatches(agreement, slicing, None if data_parallel is None else _agreement(data_parallel))


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
    return 1 / link.of("all_gather_into_tensor").bytes_per_s


def _own_stages(
    graphs: Sequence[StageGraph], held: Sequence[int], *, defers: bool, paths: frozenset[str]
) -> dict[int, StageModule]:
    last, found = len(graphs) - 1, {}
    for number in held:
        graph, chain = graphs[number], StageChain(graphs[number], paths) if paths else None
        found[number] = StageModule(
            graph.module, graph.roots, single=number == last, defers=defers, chain=chain, written=graph.written
        )
    return found

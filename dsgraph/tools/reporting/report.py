"""`report(model)`: what was done to a model and what was not, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from dsgraph import compat
from dsgraph.compiler.backend import backend
from dsgraph.errors import PartitionError
from dsgraph.step.state import ParameterState, PartitionState, partition_states

from .activity import (
    Break,
    Fallback,
    NearMiss,
    Recompile,
    Region,
    fallbacks_of,
    graph_breaks_of,
    near_misses_of,
    recompiles_of,
    regions_of,
)
from .compile_log import CompileEntry
from .measure import Activations, LoweredGraph
from .step import Memory, Step, measure_step, predict_memory
from .text import write_report
from .traffic import nbytes

SCHEMA = 1


@dataclass(frozen=True)
class Parameter:
    """A parameter of a partitioned model. Sizes in bytes, of the master dtype.

    Attributes:
        name: Its (first) name in the model.
        shape: Full shape.
        dtype: Master dtype.
        stage: ZeRO stage.
        split_over: Mesh axis over which its rows are split; None for one that every rank holds whole.
        averaged_over: Mesh axes over which its gradient is averaged.
        whole_because: Why it is whole; empty for a split one.
        bytes_full: All rows.
        bytes_here: The rows on this rank.
        bytes_replica: The gathered copy of stages 1 and 2, and what stage 3 holds of it now; 0 without one.
        is_held_for_step: Whether stage 3 gathers it once a step inside `accumulate`, as it has memory to spare.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stage: int
    split_over: str | None
    averaged_over: tuple[str, ...]
    whole_because: str
    bytes_full: int
    bytes_here: int
    bytes_replica: int
    is_held_for_step: bool


@dataclass(frozen=True)
class Pass:
    """What one pass did to one graph."""

    phase: str
    name: str
    changed: int
    notes: tuple[str, ...]
    done: tuple[str, ...]
    seconds: float
    verify_seconds: float
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True)
class Compile:
    """One compile of one captured graph.

    Attributes:
        number: Which compile of this process it was.
        function: The user's function, as `file:line (name)`.
        resumes_at: The line of the graph break that the graph follows, or None.
        kind: "training" (forward and backward) or "inference".
        codegen: "inductor" or "eager".
        from_cache: True when torch's cache had the compiled graph: the passes were not run anew, so that the graphs,
            their collectives and bytes are not known.
        pass_seconds: In all passes together.
        verify_seconds: In checking the graphs between them.
        passes: What each did, in order.
        graphs: The lowered graphs, with what each sends each time it runs.
        activations: What passes from forward to backward; None where there is no backward or it is not known.
    """

    number: int
    function: str
    resumes_at: int | None
    kind: str
    codegen: str
    from_cache: bool
    pass_seconds: float
    verify_seconds: float
    passes: tuple[Pass, ...]
    graphs: tuple[LoweredGraph, ...]
    activations: Activations | None


@dataclass(frozen=True)
class Report:
    """What was done to a model and what was not. `print(report)` shows it, `to_dict()` gives it to programs.

    Attributes:
        schema: Version of the keys of `to_dict()`.
        model: Class of the model.
        status: In one sentence: compiled, not yet run, not partitioned.
        stages: ZeRO stage of each partitioned part.
        mesh: Axis name -> ranks.
        costs: Whether the costs that passes decided by are measured or defaults; empty before the first compile.
        parameters: All partitioned parameters.
        compiles: Every graph that was compiled, in order.
        step: What a rank sends in a training step.
        memory: What a rank is predicted to hold in one; None where it is not known.
        graph_breaks: Where Dynamo had to end a graph.
        recompiles: Functions that were compiled more than once.
        fallbacks: What does not run as compiled code.
        near_misses: Where a pass left something alone, and why.
        checkpoint_regions: Regions that were not honoured, or that Dynamo did not capture.
    """

    schema: int
    model: str
    status: str
    stages: tuple[int, ...]
    mesh: dict[str, int]
    costs: str
    parameters: tuple[Parameter, ...]
    compiles: tuple[Compile, ...]
    step: Step
    memory: Memory | None
    graph_breaks: tuple[Break, ...]
    recompiles: tuple[Recompile, ...]
    fallbacks: tuple[Fallback, ...]
    near_misses: tuple[NearMiss, ...]
    checkpoint_regions: tuple[Region, ...]

    def __str__(self) -> str:
        return write_report(self)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings, numbers, booleans and None."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def report(model: nn.Module) -> Report:
    """What dsgraph did to a model and what it did not.

    Call it after the first step: graphs are compiled when they first run. Graphs are found by the parameters that they
    read and by the module that was being called. Two models of one class that are compiled by one torch function share
    their entries for frames that Dynamo gave up on, since Dynamo names the code and not the model.

    Args:
        model: The module that was given to `partition` or `torch.compile`, or the compiled one.

    Raises:
        PartitionError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise PartitionError(f"report takes a torch.nn.Module, found {type(model).__name__}")
    model = compat.unwrap_compiled(model)
    backend.log.look()
    states = partition_states(model)
    records = backend.log.of(_objects_of(model, states))
    compiled = tuple(_compile(record) for record in records)
    return Report(
        schema=SCHEMA,
        model=type(model).__name__,
        status=_status(states, records),
        stages=tuple(state.stage for state in states),
        mesh={axis.name: axis.size for state in states for axis in state.axes},
        costs="; ".join(dict.fromkeys(record.costs for record in records)),
        parameters=tuple(_parameter(entry, state, of=states) for state in states for entry in state.parameters),
        compiles=compiled,
        step=measure_step(model, states, records),
        memory=predict_memory(model, records),
        graph_breaks=graph_breaks_of(records, backend.log),
        recompiles=recompiles_of(records),
        fallbacks=fallbacks_of(model, states, records, backend.log),
        near_misses=near_misses_of(records),
        checkpoint_regions=regions_of(records),
    )


def _objects_of(model: nn.Module, states: list[PartitionState]) -> list[object]:
    objects: list[object] = [*model.modules(), *model.parameters()]
    for state in states:
        for entry in state.parameters:
            objects += [entry.param, entry.replica, entry.leaf]
    return [item for item in objects if item is not None]


def _status(states: list[PartitionState], records: list[CompileEntry]) -> str:
    parts = [] if states else ["not partitioned: call dsgraph.partition(model, ...) before torch.compile"]
    if not records:
        parts.append("nothing was compiled by dsgraph: the model was not given to torch.compile, or has not run yet")
    else:
        cached = sum(record.from_cache for record in records)
        also = f", {cached} of them found in torch's cache" if cached else ""
        parts.append(f"{len(records)} graph{'s' * (len(records) != 1)} compiled{also}")
    return "; ".join(parts)


def _parameter(entry: ParameterState, state: PartitionState, *, of: list[PartitionState]) -> Parameter:
    names = {axis.group: axis.name for axis in state.axes}
    layout, shard = entry.layout, entry.param.to_local().detach()
    groups = [group for group in (*layout.outer_groups, layout.group) if group]
    return Parameter(
        name=entry.name,
        shape=layout.shape,
        dtype=str(entry.param.dtype).removeprefix("torch."),
        stage=layout.stage,
        split_over=names.get(layout.group),
        averaged_over=tuple(names[group] for group in groups),
        whole_because=entry.whole_because,
        bytes_full=entry.param.numel() * shard.element_size(),
        bytes_here=shard.numel() * shard.element_size(),
        bytes_replica=nbytes(entry.replica) or 0,
        is_held_for_step=entry.is_held_for_step and len(of) == 1,
    )


def _compile(record: CompileEntry) -> Compile:
    passes = tuple(
        Pass(
            phase=item.phase.value,
            name=item.name,
            changed=item.changed,
            notes=item.notes,
            done=item.done,
            seconds=item.seconds,
            verify_seconds=item.verify_seconds,
            nodes_before=item.nodes_before,
            nodes_after=item.nodes_after,
        )
        for item in record.passes
    )
    return Compile(
        number=record.number,
        function=str(record.capture.function),
        resumes_at=record.capture.resumes_at,
        kind="training" if record.training else "inference",
        codegen=record.codegen,
        from_cache=record.from_cache,
        pass_seconds=sum(item.seconds for item in passes),
        verify_seconds=sum(item.verify_seconds for item in passes),
        passes=passes,
        graphs=record.graphs,
        activations=record.activations,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value

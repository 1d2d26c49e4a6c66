"""`report(model)`: what was done to a model and what was not, as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from dsgraph.compat.compiled import unwrap_compiled
from dsgraph.partitioning.blocks.repeated_blocks import is_block
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import PartitionState, partition_states
from dsgraph.partitioning.transforms.offloaded import nothing_moved
from dsgraph.utils.errors import PartitionError

from .activity import (
    Fallback,
    fallbacks_of,
    graph_breaks_of,
    near_misses_of,
    recompiles_of,
    regions_of,
)
from .compile_log import CompileEntry, CompileLog
from .predicted_memory import predict_memory
from .report_record import Compile, Parameter, Pass, ReportRecord
from .step import measure_step
from .text import write_report
from .traffic import held_once, nbytes
from .units import list_units

SCHEMA = 1


@dataclass(frozen=True)
class Report(ReportRecord):
    """A report of what was done to a model and what was not.

    `print(report)` shows it, `to_dict()` gives it to programs.

    Its attributes are those of `ReportRecord`.
    """

    def __str__(self) -> str:
        return write_report(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as dicts, lists, strings, numbers, booleans and None."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def report_on(model: nn.Module, log: CompileLog) -> Report:
    """Return the report of a model.

    Args:
        model: The module that was given to `partition` or `torch.compile`, or the compiled one.
        log: Of the backend that compiled it.

    Raises:
        PartitionError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise PartitionError(f"report takes a torch.nn.Module, found {type(model).__name__}")
    model = unwrap_compiled(model)
    log.look()
    states = partition_states(model)
    records = log.of(_objects_of(model, states))
    held = held_once(states)
    fallbacks = fallbacks_of(model, states, records, log)
    memory, unknown = predict_memory(model, states, records)
    return Report(
        schema=SCHEMA,
        model=type(model).__name__,
        status=_status(states, records),
        stages=tuple(state.zero.number for state in states),
        mesh={axis.name: axis.size for state in states for axis in state.axes},
        costs="; ".join(dict.fromkeys(record.costs for record in records)),
        parameters=tuple(
            _parameter(entry, state, is_held=entry in held) for state in states for entry in state.parameters
        ),
        compiles=tuple(_compile(record) for record in records),
        units=list_units(model, states, records),
        step=measure_step(model, states, records),
        memory=memory,
        memory_unknown=unknown,
        memory_limit=min((item.memory_limit for item in records if item.memory_limit is not None), default=None),
        limit_gaps=tuple(dict.fromkeys(_limit_gaps(states, records, fallbacks))),
        graph_breaks=graph_breaks_of(records, log),
        recompiles=recompiles_of(records),
        fallbacks=fallbacks,
        near_misses=near_misses_of(records),
        checkpoint_regions=regions_of(records),
    )


def _limit_gaps(
    states: list[PartitionState], records: list[CompileEntry], fallbacks: Sequence[Fallback]
) -> Iterator[str]:
    yield from (record.limit_gap for record in records if record.limit_gap)
    yield from (gap for state in states for gap in state.limit_gaps)
    is_planned = any(record.memory is not None and record.memory.keeps_outputs for record in records)
    if is_planned and not any(state.step.limit.is_kept for state in states):
        uncompiled = [item.what for item in fallbacks if item.kind == "function runs uncompiled"]
        yield from (f"{what} runs uncompiled, and its memory is not planned" for what in uncompiled)


def _objects_of(model: nn.Module, states: list[PartitionState]) -> list[object]:
    objects: list[object] = [*model.modules(), *model.parameters()]
    for state in states:
        for entry in state.parameters:
            objects += [entry.param, entry.gathered_copy, entry.leaf]
    return [item for item in objects if item is not None]


def _status(states: list[PartitionState], records: list[CompileEntry]) -> str:
    parts = [] if states else ["not partitioned: call dsgraph.partition(model, ...) before torch.compile"]
    if all(record.is_step for record in records):
        parts.append("nothing was compiled by dsgraph: the model was not given to torch.compile, or has not run yet")
    else:
        graphs = [record for record in records if not record.is_step]
        cached = sum(record.from_cache for record in graphs)
        also = f", {cached} of them found in torch's cache" if cached else ""
        parts.append(f"{len(graphs)} graph{'s' * (len(graphs) != 1)} compiled{also}")
    parts += dict.fromkeys(filter(None, (_on_blocks(state, records) for state in states)))
    parts += dict.fromkeys(filter(None, map(nothing_moved, states)))
    parts += [f"{len(each.ignored)} parameters are each rank's own (ignored_params)" for each in states if each.ignored]
    modules = [module for state in states for module in state.root.modules()]
    if any(hasattr(each, "_is_fsdp_managed_module") and getattr(each.config, "layerdrop", 0) for each in modules):
        parts.append("layerdrop has no effect: all layers run, since ranks must run alike")
    return "; ".join(parts)


def _on_blocks(state: PartitionState, records: list[CompileEntry]) -> str:
    blocks = [id(module) for module in state.root.modules() if is_block(module)]
    if not blocks or not records:
        return ""
    apart = len(state.step.ran()) if state.zero.gathers_each_use else len(blocks)
    if apart and any(record.module in blocks for record in records):
        return f"{apart} repeated blocks are graphs of their own"
    return f"{len(blocks)} repeated blocks were not compiled as graphs of their own"


def _parameter(entry: ParameterState, state: PartitionState, *, is_held: bool) -> Parameter:
    names = {axis.group: axis.name for axis in state.axes}
    spec, shard = entry.spec, entry.param.to_local().detach()
    groups = [group for group in (*spec.outer_groups, spec.group) if group]
    return Parameter(
        name=entry.name,
        shape=spec.shape,
        dtype=str(entry.param.dtype).removeprefix("torch."),
        stage=entry.zero.number,
        split_over=names.get(spec.group),
        averaged_over=tuple(names[group] for group in groups),
        replicated_because=entry.replicated_because,
        bytes_full=entry.param.numel() * shard.element_size(),
        bytes_here=shard.numel() * shard.element_size(),
        bytes_copy=nbytes(entry.gathered_copy) or 0,
        is_held_for_step=is_held,
    )


def _compile(record: CompileEntry) -> Compile:
    passes = tuple(Pass(**{**vars(item), "phase": item.phase.value}) for item in record.passes)
    return Compile(
        number=record.number,
        function=str(record.capture.function),
        resumes_at=record.capture.resumes_at,
        kind="step" if record.is_step else "training" if record.training else "inference",
        codegen=record.codegen,
        from_cache=record.from_cache,
        pass_seconds=sum(item.seconds for item in passes),
        verify_seconds=sum(item.verify_seconds for item in passes),
        passes=passes,
        graphs=record.graphs,
        activations=record.activations,
    )

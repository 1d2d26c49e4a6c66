"""Checks whether a `memory_limit` can be promised: the plan of a single graph must count the complete step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dsgraph.compat.compiled import recompile_limit
from dsgraph.compat.dynamo import is_marked_with_maximum
from dsgraph.compat.inductor import activation_memory_budget
from dsgraph.compiler.frames import Capture
from dsgraph.compiler.request import CompileOutcome, CompileRequest
from dsgraph.inductor_ext import size_hint
from dsgraph.partitioning.state import PartitionState, partition_states
from dsgraph.passes import CaptureFacts
from dsgraph.passes.analysis.budget import StageNeeds
from dsgraph.passes.analysis.step_memory import AROUND
from dsgraph.passes.compat import symbolic_expression
from dsgraph.passes.ir.graph import placeholders
from dsgraph.passes.memory.fit import MemoryLimitError, least_limit
from dsgraph.passes.parallel.stages.stage_graphs import StageGraphModule
from dsgraph.ranks.agreement import Agreements
from dsgraph.utils.byte_counts import on_device
from dsgraph.utils.errors import OptionError


def refuse_memory_budget() -> None:
    """Refuse torch's own activation memory budget, which splits graphs by other rules than the passes expect.

    Raises:
        OptionError: torch._functorch.config.activation_memory_budget is not 1.0.
    """
    budget = activation_memory_budget()
    if budget != 1.0:
        raise OptionError(
            f"torch._functorch.config.activation_memory_budget is {budget}, which the dsgraph backend does not "
            "support, because a dropout that is recomputed would draw other numbers: set it to 1.0, and use the option "
            "'memory_limit'"
        )


def limit_gap(request: CompileRequest) -> str:
    """Return why a limit cannot be promised for the steps that run a graph; empty if it can, or without a limit."""
    capture, facts, module = request.capture, request.facts, request.module
    if request.options.memory_limit is None or facts.stage is not None or is_counted_around(request):
        return ""  # `StageLimits` and `AroundBlocks` count the memory besides the graphs
    states = partition_states(module) if module is not None else []
    if module is None or not states:
        return "no module of a partitioned model calls it: compile the model"
    broken = capture.ends_in.place if capture.ends_in is not None else capture.region
    if broken is not None or capture.resumes_at is not None:
        where = broken or f"{capture.function.file}:{capture.resumes_at}"
        return f"the forward is several graphs, because of the graph break at {where}: remove the graph break"
    own = {id(param) for param in module.parameters()}
    entries = [entry for state in states for entry in state.parameters]
    if not all(id(entry.param) in own for entry in entries):
        return (
            f"{type(module).__name__} is compiled separately, and other graphs of the step use memory as well: "
            "compile the complete model"
        )
    known = {id(entry.param) for entry in entries}
    for name, param in module.named_parameters():
        if param.requires_grad and id(param) not in known:
            return (
                f"parameter {name!r} is trained but not partitioned, so that its optimizer state is not counted: "
                "partition the complete model"
            )
    if not facts.params and not any(state.gradients_stay_local for state in states):
        return "the graph reads no parameter, so the step also runs other graphs: compile the complete model"
    if not facts.params:
        return (
            "micro-batches of `accumulate` that add gradients on this rank are not planned: use stage=3, or "
            "stage=2 with reduce_once=False"
        )
    return ""


def bound_sizes(gm: GraphModule, inputs: Sequence[Any], capture: Capture) -> str:
    """Guard a graph with dynamic sizes so that it runs only for sizes up to those for which it is planned.

    Return why the limit cannot be promised, because larger sizes may run the same graph; empty if they cannot.
    """
    sizes = _symbolic_sizes(gm)
    if not sizes:
        return ""
    if any(isinstance(value, torch.Tensor) and is_marked_with_maximum(value) for value in inputs):
        return "the graph is planned for the current size, and mark_dynamic(max=...) allows larger ones: leave max= out"
    if capture.times >= recompile_limit():
        return (
            "torch._dynamo.config.recompile_limit allows no more compiles for larger batches, so the last graph runs "
            "any size: begin with the largest batch, or pad batches to few sizes"
        )
    if any(number is None for _, number in sizes):
        return "sizes of the graph depend on the data (mark_unbacked): use mark_dynamic"
    for size, number in sizes:
        bool(size <= number)
    return ""


def over_limit(request: CompileRequest, outcome: CompileOutcome) -> str:
    """Return why what ranks agreed on exceeds the limit for this rank's batch; empty if it does not."""
    limit = request.facts.memory_limit
    if outcome.step_peak is None or limit is None:
        return ""
    states = partition_states(request.module) if request.module is not None else []
    copies = sum(state.step.limit.staying for state in states) if is_limited_block(request.facts) else 0
    takes = outcome.step_peak + copies
    if takes <= limit:
        return ""
    what = "keep as many gathered parameters as with" if copies else "use the plan of"
    return (
        f"all ranks {what} the first batch, and this batch takes {takes:,} bytes of {limit:,}: begin with the largest "
        "batch, or raise the limit"
    )


def _symbolic_sizes(gm: GraphModule) -> list[tuple[torch.SymInt, int | None]]:
    """Return the dynamic sizes of a graph's inputs with their current values; None for data-dependent sizes."""
    found: dict[str, tuple[torch.SymInt, int | None]] = {}
    for node in placeholders(gm):
        value = node.meta.get("example_value", node.meta.get("val"))
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and not isinstance(symbolic_expression(size), int):
                found.setdefault(str(size), (size, size_hint(size)))
    return list(found.values())


def with_unread(facts: CaptureFacts, inputs: Sequence[Any], module: nn.Module) -> CaptureFacts:
    """Return the facts of a model's graph, extended by the memory of parameters that the graph does not read."""
    names = {id(param): name for name, param in module.named_parameters()}
    read = {id(inputs[number]) for number in facts.params}
    given = {id(value) for value in inputs}
    states = partition_states(module)
    unread = [entry for state in states for entry in state.parameters if id(entry.param) not in read]
    copies = [entry.gathered_copy for entry in unread if entry.gathered_copy is not None]
    return replace(
        facts,
        unread=tuple(entry.current_spec(names.get(id(entry.param), entry.name)) for entry in unread),
        unread_copies=sum(copy.untyped_storage().nbytes() for copy in copies if id(copy) not in given),
    )


def with_shared_graph(request: CompileRequest, gm: GraphModule) -> tuple[CaptureFacts, str]:
    """Return the facts of a graph without gathers, and why no limit can be promised for it; empty if one can.

    The facts include the limit of the pipeline stage or the repeated block that the graph is.

    Raises:
        OptionError: The model has a limit and is not partitioned.
    """
    options, facts, module = request.options, request.facts, request.module
    if options.memory_limit is None:
        return facts, ""
    if isinstance(module, StageGraphModule) and module.needs is not None:
        limit, tier = on_device(options.memory_limit, facts.device_type), options.activation_offload
        return replace(facts, memory_limit=limit, keeps_limit=True, offload_tier=tier, stage=module.needs), ""
    facts = _with_block(request, options.memory_limit)
    if facts.stage is not None:
        return facts, bound_sizes(gm, request.inputs, request.capture)
    _refuse_limit_without_parts(request)
    return facts, limit_gap(request) if request.trains else ""


def _refuse_limit_without_parts(request: CompileRequest) -> None:
    """Refuse a limit for a model that `partition` does not know: its parameters would not be counted."""
    if request.module is None or partition_states(request.module):
        return
    if request.trains and any(isinstance(x, nn.Parameter) for x in request.inputs):
        raise OptionError(
            "option 'memory_limit' has no effect on a model that is not partitioned: call dsgraph.partition(model, "
            "stage=0) before torch.compile, in one process too, or remove the option"
        )


def _with_block(request: CompileRequest, limit: float) -> CaptureFacts:
    """Return the facts of a graph; if it is a repeated block, with what a step needs besides it."""
    module, block, facts = request.module, request.unit.block, request.facts
    states = partition_states(module) if module is not None else []
    around = states[0].step.limit.around if len(states) == 1 else None
    if around is None or block not in around.in_flight or not request.trains or _is_part(request):
        return facts
    (state,) = states
    data = (value for value in request.inputs if isinstance(value, Tensor) and not hasattr(value, "dsgraph_entry"))
    blocks = [copies.memory() for copies in state.step.blocks]
    of_blocks = 0 if held_gradients(state.root) else sum(one.gradients for one in blocks)  # else they exist already
    held = {
        "gradients": sum(entry.gradient_bytes for entry in state.parameters if entry.param.requires_grad) - of_blocks,
        "communication": max(2 * one.copies + one.full_gradients for one in blocks),
        AROUND: max(0, around.beside - sum(map(_bytes, data))),
    }
    state.step.limit.note_planned(around)
    needs = StageNeeds(
        held,
        around.in_flight[block],
        is_block=True,
        gradients=of_blocks,
        between=around.between,
        before=around.before,
    )
    facts = replace(with_unread(facts, request.inputs, state.root), stage=needs)
    return replace(facts, memory_limit=on_device(limit, facts.device_type), keeps_limit=True)


def _bytes(value: Tensor) -> int:
    return value.element_size() * math.prod(size_hint(size) or 0 for size in value.shape)


def agree_on_spare(
    request: CompileRequest, outcome: CompileOutcome, refusal: MemoryLimitError | None, agreements: Agreements
) -> None:
    """Note the memory that a step leaves below the limit that its blocks keep: copies of blocks may stay in it.

    The ranks compare it when they first compile such a block. If one of them cannot keep the limit, none of them tries.

    Args:
        request: The graph of a block.
        outcome: The outcome of its compile.
        refusal: The error of its compile; None if a plan keeps the limit.
        agreements: What the ranks have agreed on.

    Raises:
        MemoryLimitError: A rank cannot keep the limit.
    """
    facts, peak = request.facts, outcome.step_peak
    assert request.module is not None and facts.memory_limit is not None
    (state,) = partition_states(request.module)
    own = None if peak is None else max(0, facts.memory_limit - least_limit(peak, fuses=facts.fuses))
    lines = ["beside blocks", f"within {facts.memory_limit}", *request.unit.blocks]
    spare = agreements.over(state.parameter_mesh).least_spare(lines, lambda: -1 if refusal is not None else own)
    if spare == -1 or refusal is not None:
        why = refusal or "memory_limit cannot be kept on another rank"
        error = MemoryLimitError(f'{why}. One graph may keep a smaller limit: use partition(blocks="none")')
        error.least = refusal.least if refusal is not None else 0
        raise error
    state.step.note_spare(max(0, spare or 0))


def is_limited_block(facts: CaptureFacts) -> bool:
    """Return True for the graph of a block that is planned for a limit."""
    return facts.stage is not None and facts.stage.is_block


def is_counted_around(request: CompileRequest) -> bool:
    """Return True for a graph around blocks whose memory is counted with the blocks."""
    states = partition_states(request.module) if request.module is not None else []
    return request.capture.is_around_blocks and any(state.step.limit.is_kept for state in states)


def _is_part(request: CompileRequest) -> bool:
    """Return True for a graph that is only a part of its block's forward."""
    capture = request.capture
    inside = request.unit.module != request.unit.block
    return inside or capture.ends_in is not None or capture.region is not None or capture.resumes_at is not None


def held_gradients(module: nn.Module) -> int:
    """Return the bytes of a model's gradients that exist before a backward adds its own."""
    return sum(map(_held_gradients, partition_states(module)))


def _held_gradients(state: PartitionState) -> int:
    trained = [entry for entry in state.parameters if entry.param.requires_grad]
    held = sum(entry.gradient_bytes for entry in trained if entry.param.grad is not None)
    return max(held, sum(entry.gradient_bytes for entry in trained)) if state.accumulating else held

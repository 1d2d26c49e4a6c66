"""`torch.compile(model, backend="dsgraph")`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from dsgraph.compat.dynamo import active_ddp, past_dynamo
from dsgraph.partitioning.additions import is_plain
from dsgraph.partitioning.blocks.unit import unit_of
from dsgraph.partitioning.state import PartitionState, partition_states
from dsgraph.partitioning.step.step_plan import StepPlan
from dsgraph.partitioning.step.step_record import StepRecord, Work
from dsgraph.passes import PassRecord, Phase
from dsgraph.passes.ir.graph import placeholders
from dsgraph.passes.ir.inline_regions import inline_regions
from dsgraph.passes.memory.fit import MemoryLimitError
from dsgraph.passes.parallel.stages.stage_graphs import StageGraphModule
from dsgraph.ranks.agreement import Agreement, Agreements
from dsgraph.ranks.rank_notes import Intent
from dsgraph.utils.byte_counts import default_limit_of_device, on_device
from dsgraph.utils.errors import StrictError

from .around_blocks import options_of_graph
from .build_pipeline import bind_options, build_pipeline, uncompiled_pipeline
from .capture import full_names, partitioned_mesh, read_facts, refuse_added_parameters
from .captured_sums import add_sums
from .captured_writes import refuse_lost_gradients, refuse_writes
from .costs.agreed import known_costs
from .default_compiler import Usual
from .frames import read_capture
from .memory_limit.limit_scope import (
    agree_on_spare,
    bound_sizes,
    held_gradients,
    is_counted_around,
    is_limited_block,
    limit_gap,
    over_limit,
    refuse_memory_budget,
    with_shared_graph,
    with_unread,
)
from .memory_limit.spare_memory import spare_bytes
from .options import BackendOptions, parse_options
from .request import CompileObserver, CompilerChoice, CompileRequest, Watches
from .runs import Communication, communication_lines
from .step_plans import plan_step, run_as_unit, work_of
from .transforms import move_markers_ahead
from .wrappers import WRAPPERS


class Backend:
    """The compiler that Dynamo calls with each graph it captures.

    One instance is registered with torch. Across compiles it keeps what the ranks have agreed on and whether it has
    warned; everything else belongs to one compile, or to the observers.

    Attributes:
        agreements: What the ranks of each mesh have agreed on.
        observers: They see each compile.
    """

    __name__ = "dsgraph"

    def __init__(
        self,
        *,
        observers: Sequence[CompileObserver] = (),
        choices: Sequence[Callable[[], CompilerChoice | None]] = (),
    ) -> None:
        """Create a backend.

        Args:
            observers: Called for each compile, in this order.
            choices: Called at each compile; the first one that returns a choice decides how to compile. If none does,
                the graph goes through its passes and the code generator that the options name.
        """
        self.agreements = Agreements()
        self.observers = tuple(observers)
        self._choices = tuple(choices)
        self._compiles = 0
        self._has_warned = False

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, object] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compile one captured graph.

        Args:
            gm: Dynamo's graph; taken over.
            example_inputs: Its inputs.
            options: See `BackendOptions`.
            mode: One of Inductor's modes, such as "max-autotune".

        Raises:
            OptionError: An option is unknown or wrong.
            PartitionError: The model is trained with a parameter that was added after it was partitioned.
            PassError: A pass failed or broke an invariant.
            RanksDisagreeError: Ranks are about to compile different collectives.
            StrictError: `strict=True` and something was not done that the options or the model asked for.
        """
        try:
            return self._compile(gm, example_inputs, options=options, mode=mode)
        except Exception as error:
            if not _is_own(error):
                raise
            raise past_dynamo(error) from error.__cause__

    def _compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, object] | None, mode: str | None
    ) -> Callable[..., Any]:
        refuse_memory_budget()
        inlined = inline_regions(gm)
        refuse_lost_gradients(gm)
        move_markers_ahead(gm)
        chosen = parse_options(options)
        choice = next((found for ask in self._choices if (found := ask()) is not None), Usual())
        request = self._request(gm, example_inputs, chosen, mode=mode, choice=choice)
        states = partition_states(request.module) if request.module is not None else []
        self._warn_of_limit(request, request.limit_gap)
        self._warn_of_read_ahead(request, states)
        watch = Watches([observer.begin(request) for observer in self.observers])
        compiler = choice.compiler(request, watch)
        if request.agreement is None and not isinstance(request.module, StageGraphModule):
            self._warn_of_local_gradients(example_inputs, chosen)
        elif request.agreement is not None and request.is_new:
            request.agreement.confirm("compile different collectives", request.lines)
        is_limited = is_limited_block(request.facts)
        try:
            compiled = compiler.compile(gm, example_inputs)
        except MemoryLimitError as error:
            if is_limited:
                agree_on_spare(request, compiler.outcome, error, self.agreements)
            raise
        if is_limited:
            agree_on_spare(request, compiler.outcome, None, self.agreements)
        self._warn_of_limit(request, over_limit(request, compiler.outcome))
        inlining = [PassRecord(inline_regions.__name__, Phase.CAPTURE, len(inlined), inlined)] if inlined else []
        watch.finished(replace(compiler.outcome, passes=(*inlining, *compiler.outcome.passes)))
        compiled = run_as_unit(compiled, request, self.plan_step)
        for wrap in WRAPPERS:
            compiled = wrap(compiled, request, compiler)
        return compiled

    def plan_step(
        self, state: PartitionState, record: StepRecord, *, options: BackendOptions | None = None
    ) -> StepPlan:
        """Return the plan of a recorded step; options are those of its graphs, None without any."""
        self._compiles += 1
        how: dict[str, Any] = {"observers": self.observers, "agreements": self.agreements}
        options = options or BackendOptions(codegen="eager", pipeline=uncompiled_pipeline())
        return plan_step(state, record, options, number=self._compiles, **how)

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        """Return the backend itself: a copy of a compiled model is compiled by the same backend."""
        return self

    def _request(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        options: BackendOptions,
        *,
        mode: str | None,
        choice: CompilerChoice,
    ) -> CompileRequest:
        self._compiles += 1
        capture, module = read_capture(gm)
        options = options_of_graph(options, gm, inputs, capture, mode=mode)
        refuse_added_parameters(inputs, module)
        for observer in self.observers:
            observer.captured(capture, options)
        # Without passes after the capture a partitioner of option 'inductor' may split the graph; it cannot add sums.
        passes = bind_options(options)
        adds_sums = options.codegen == "eager" or not passes.ends_with_capture
        sums = add_sums(gm, inputs) if adds_sums else ()
        unit = unit_of(module)
        facts = replace(read_facts(gm, inputs, module, unit), fuses=options.codegen == "inductor")
        refuse_writes(gm, facts)
        request = CompileRequest(
            number=self._compiles,
            options=options,
            pipeline=passes,
            mode=mode,
            capture=capture,
            module=module,
            unit=unit,
            inputs=inputs,
            facts=facts,
            sums=sums,
            work=work_of(gm, inputs) if any(hasattr(value, "dsgraph_entry") for value in inputs) else Work(),
            input_names=tuple(node.name for node in placeholders(gm)),
        )
        names = full_names(inputs, facts, module)
        if names:
            where = Path(capture.function.file).name
            place = f"{capture.function.function} ({where})"
            talk = Communication.of(gm, names, place=place, training=_reduces(inputs, names))
            request = replace(request, communication=talk)
        if facts.params:
            return self._agreed(request, gm, choice)
        facts, gap = with_shared_graph(request, gm)
        facts = choice.facts(facts, options)
        return replace(request, facts=facts, pipeline=build_pipeline(options, facts, bound=passes), limit_gap=gap)

    def _agreed(self, request: CompileRequest, gm: GraphModule, choice: CompilerChoice) -> CompileRequest:
        """Return the request, extended by what the ranks of the mesh agree on."""
        facts, inputs, options = request.facts, request.inputs, request.options
        mesh = partitioned_mesh(inputs, facts, request.module)
        assert mesh is not None
        agreement = self.agreements.over(mesh)
        names = dict(request.communication.parameters)
        training = _reduces(inputs, facts.params)
        agreement.announce(
            Intent("compiles a graph", place=request.communication.place),
            communication_lines(gm, facts, names, training=training),
        )
        known = known_costs(agreement, mesh.device_type)
        limit = _memory_limit(options, facts.device_type, agreement)
        gap = limit_gap(request)
        keeps = options.memory_limit is not None and not gap and not is_counted_around(request)
        if request.module is not None:
            facts = replace(facts, held_gradients=held_gradients(request.module))
        if keeps and request.module is not None:
            facts = with_unread(facts, inputs, request.module)
            gap = bound_sizes(gm, inputs, request.capture) if request.trains else ""
        tier = options.activation_offload if keeps else None
        facts = replace(facts, memory_limit=limit, keeps_limit=keeps, offload_tier=tier)
        known_facts = replace(facts, costs=known.model(mesh, facts.axes))
        facts = choice.facts(known_facts, options)
        communication = communication_lines(gm, facts, names, training=training)
        spare = partial(spare_bytes, gm, inputs, facts=facts, module=request.module)
        keep_bytes = agreement.least_spare([f"within {facts.memory_limit}", *communication], spare)
        pipeline = build_pipeline(options, facts, bound=request.pipeline)
        lines = (*(f"pass {item.name}" for item in pipeline), *communication)
        return replace(
            request,
            pipeline=pipeline,
            facts=replace(facts, keep_bytes=keep_bytes),
            costs=known.describe(mesh, facts.axes),
            agreement=agreement,
            limit_gap=gap if request.trains else "",
            lines=lines,
            is_new=not agreement.knows(lines),
        )

    def _warn_of_local_gradients(self, inputs: Sequence[Any], options: BackendOptions) -> None:
        if self._has_warned or not dist.is_initialized() or dist.get_world_size() == 1 or active_ddp():
            return
        trained = [x for x in inputs if isinstance(x, nn.Parameter) and is_plain(x) and not hasattr(x, "dsgraph_own")]
        if not trained or not torch.is_grad_enabled():
            return
        message = (
            f"this model was not partitioned: the gradients of its {len(trained)} parameters will not be averaged over "
            f"the {dist.get_world_size()} ranks; call dsgraph.partition(model, mesh, stage=...) before torch.compile"
        )
        self._warn(message, options)
        self._has_warned = True

    def _warn_of_limit(self, request: CompileRequest, gap: str) -> None:
        if gap:
            self._warn(f"memory_limit cannot be promised for {request.function}: {gap}", request.options)

    def _warn_of_read_ahead(self, request: CompileRequest, states: Sequence[PartitionState]) -> None:
        is_stored = any(entry.tier == "disk" for state in states for entry in state.parameters)
        if request.options.read_ahead_bytes is None or is_stored:
            return
        if states or any(isinstance(x, nn.Parameter) for x in request.inputs):
            message = (
                f"option 'read_ahead_bytes' has no effect in {request.function}: no parameter of the model is stored "
                "on disk; remove the option, or store parameters there with dsgraph.partition(model, offload=...)"
            )
            self._warn(message, request.options)

    def _warn(self, message: str, options: BackendOptions) -> None:
        if options.strict:
            raise StrictError(message)
        warnings.warn(message, stacklevel=3)


def _is_own(error: Exception) -> bool:
    """Return True for an error of one of dsgraph's classes."""
    return type(error).__module__.split(".")[0] == "dsgraph"


def _memory_limit(options: BackendOptions, device_type: str, agreement: Agreement) -> int | None:
    # Ranks exchange it even if some have a limit of their own: the n-th exchange of all must be the same.
    least = agreement.least_memory(default_limit_of_device) if device_type == "cuda" else None
    return least if options.memory_limit is None else on_device(options.memory_limit, device_type)


def _reduces(inputs: Sequence[Any], parameters: Iterable[int]) -> bool:
    return torch.is_grad_enabled() and any(inputs[number].requires_grad for number in parameters)

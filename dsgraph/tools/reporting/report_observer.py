"""Keeps the log of a backend's compiles, and makes errors of what was not done where `strict=True` asks for it."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from dsgraph.compiler.frames import Capture
from dsgraph.compiler.memory_limit.limit_scope import over_limit
from dsgraph.compiler.options import BackendOptions
from dsgraph.compiler.request import CompileOutcome, CompileRequest, CompileWatch
from dsgraph.partitioning.state import partition_states
from dsgraph.passes import PassContext

from .compile_log import CompileEntry, CompileLog, owners_among
from .measure import Measurements
from .strict import refuse_capture, refuse_compile, refuse_given_up, refuse_unused_kernels, refuse_without_effect


class ReportObserver:
    """The compiles of a backend that `report` knows.

    Attributes:
        log: The compiles of the models that are alive.
    """

    def __init__(self) -> None:
        self.log = CompileLog()

    def captured(self, capture: Capture, options: BackendOptions) -> None:
        """Record what Dynamo has noted since the last capture.

        Raises:
            StrictError: Dynamo gave up on a function, broke a graph or compiles too often, and `strict`.
        """
        given_up = self.log.look()
        if options.strict:
            refuse_given_up(given_up, capture)
            refuse_capture(capture, options, self.log)

    def begin(self, request: CompileRequest) -> CompileWatch:
        """Start to measure the graphs of one compile.

        Raises:
            StrictError: With `strict`, an option has no effect on this model.
        """
        if request.options.strict:
            refuse_without_effect(request)
        return _Measuring(self.log, request)


class _Measuring(CompileWatch):
    def __init__(self, log: CompileLog, request: CompileRequest) -> None:
        self._log = log
        self._request: CompileRequest | None = request  # until it is compiled: it holds the model
        self._measured = Measurements(
            request.facts, with_inductor=request.options.codegen == "inductor", in_step=torch.is_grad_enabled()
        )

    def joint(self, gm: GraphModule) -> None:
        """Read the checkpoint regions."""
        self._measured.take_regions(gm)

    def after_phase(self, gm: GraphModule, ctx: PassContext) -> None:
        """Read traffic, nodes and memory."""
        self._measured.take(gm, ctx)

    def finished(self, outcome: CompileOutcome) -> None:
        """Add the compile to the log.

        Raises:
            StrictError: Something was asked for and not done, and `strict`.
        """
        request, self._request = self._request, None
        assert request is not None
        record = _record(request, self._measured, outcome)
        if request.options.strict:
            refuse_compile(record)
            refuse_unused_kernels(self._of_model(record, request))
        self._log.add(record, owners_among(request.inputs, request.module))

    def _of_model(self, record: CompileEntry, request: CompileRequest) -> list[CompileEntry]:
        """Return the graphs of a model, once they are known: with repeated blocks when their step is planned."""
        parts = partition_states(request.module) if request.module is not None else []
        if not any(part.step.blocks for part in parts):
            return [record]
        return self._log.of(parts[0].root.modules()) if request.facts.is_step else []


def _record(request: CompileRequest, measured: Measurements, outcome: CompileOutcome) -> CompileEntry:
    return CompileEntry(
        number=request.number,
        capture=request.capture,
        module=id(request.module) if request.module is not None else 0,
        unit=request.unit,
        parameters={item.parameter: item.model_name for item in request.facts.roles.values() if item.parameter},
        codegen=request.options.codegen,
        in_step=measured.in_step,
        training=request.trains,
        is_step=request.facts.is_step,
        reduces=bool(request.facts.params or request.facts.block_params),
        reads_held=request.reads_held,
        from_cache=outcome.from_cache,
        unidentified=outcome.unidentified,
        passes=outcome.passes,
        graphs=tuple(measured.graphs),
        activations=measured.activations,
        memory=measured.memory,
        memory_limit=request.facts.memory_limit,
        limit_gap=request.limit_gap or over_limit(request, outcome),
        needs=request.facts.stage,
        held_gradients=request.facts.held_gradients,
        costs=request.costs,
        ignored_tags=measured.ignored_tags,
        unlowered=tuple(sorted(measured.unlowered.items())),
    )

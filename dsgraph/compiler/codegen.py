"""One compile of one captured graph: runs the capture passes and hands the rest to a code generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from dsgraph.compat import inductor
from dsgraph.compat.inductor import (
    autograd_cache_hits,
    compile_with_aot,
    compile_with_inductor,
    keeping_order,
    uses_cudagraphs,
)
from dsgraph.inductor_ext import register_lowerings
from dsgraph.passes import (
    CaptureFacts,
    InferenceLowering,
    Partitioner,
    PassContext,
    Phase,
    Pipeline,
    Runner,
)
from dsgraph.passes.core.collective_order import collective_lines
from dsgraph.passes.kernels.registry import register_kernels
from dsgraph.passes.memory.fit import Agree, alone
from dsgraph.passes.runner.partitioner import source_hash
from dsgraph.passes.zero.await_copies import AwaitCopies
from dsgraph.utils.errors import OptionError

from .options import BackendOptions, mode_settings
from .request import CompileOutcome, CompileWatch
from .transforms import normalize_markers

# The hooks through which Inductor takes the passes; options["inductor"] cannot use them as well.
_HOOKS = ("custom_partitioner_fn", "joint_custom_post_pass")


class _Partitioner(Partitioner):
    """Shows the joint graph to a watch before any pass sees it."""

    def __init__(self, runner: Runner, facts: CaptureFacts, watch: CompileWatch, *, agree: Agree = alone) -> None:
        super().__init__(runner, facts, agree=agree)
        self._watch = watch

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        self._watch.joint(gm)
        return super().__call__(gm, joint_inputs, **kwargs)


class Compilation:
    """Compiles one captured graph with the passes of its options.

    Attributes:
        options: The user's.
        awaits_copies: True if the compiled graph waits for its gathered copies; otherwise its caller must.
        collectives: One line a collective of the lowered graphs; None until they are lowered, and for good when torch's
            cache had the compiled graph.
        from_cache: True if AOTAutograd's cache had the graph, so that no pass after the capture ran.
        unidentified: Passes whose code cannot be identified, so that torch's caches were off.
    """

    def __init__(
        self,
        options: BackendOptions,
        facts: CaptureFacts,
        pipeline: Pipeline,
        *,
        mode: str | None,
        watch: CompileWatch | None = None,
        agree: Agree = alone,
        boxed: Callable[[GraphModule], Callable[..., Any]] = inductor.boxed,
        inductor: Callable[..., Callable[..., Any]] = compile_with_inductor,
    ) -> None:
        self.options = options
        self._boxed = boxed  # how codegen "eager" runs a graph
        self._inductor = inductor  # what codegen "inductor" compiles with
        self._mode = mode
        self._agree = agree  # asks the other ranks how to keep a memory limit
        self._watch = watch or CompileWatch()
        self.collectives: list[str] | None = None
        # A replayed recording of kernels would not wait for what is under way.
        if facts.gathered_copies and _records_cuda_graphs(options, mode):
            facts = replace(facts, gathered_copies=frozenset())
        self._facts = facts
        self.awaits_copies = bool(facts.gathered_copies) and any(isinstance(item, AwaitCopies) for item in pipeline)
        self.from_cache = False
        self.unidentified = unidentified(options, pipeline)
        self._partitioner: Partitioner | None = None
        self._runner = Runner(pipeline, sink=self._watch, after_phase=self._after_phase, verify=options.verify)

    @property
    def orders(self) -> list[str]:
        """The order of collectives step by step, up to `collectives`; see `Runner.orders`."""
        return self._runner.orders

    @property
    def outcome(self) -> CompileOutcome:
        """The outcome of `compile`."""
        peak = self._partitioner.step_peak if self._partitioner is not None else None
        return CompileOutcome(tuple(self._runner.records), self.from_cache, self.unidentified, peak)

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Rewrite and compile `gm`; the result takes the inputs that `gm` takes."""
        normalize_markers(gm)
        self._runner.run(gm, self._facts.context(gm, Phase.CAPTURE, inference=not torch.is_grad_enabled()))
        if self.options.codegen == "eager":
            return self._compile_eager(gm, inputs)
        hits = autograd_cache_hits()
        compiled = self._compile_inductor(gm, inputs)
        self.from_cache = autograd_cache_hits() > hits
        return compiled

    def _compile_inductor(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        register_lowerings()
        register_kernels()
        patches = _settings(self.options, self._mode)
        if self._facts.params or self._facts.gathered_copies:
            patches = {**keeping_order(), **patches}
        # A dump holds every graph, but a graph from a cache has no stages after the capture.
        compile_graph = partial(
            self._inductor, gm, inputs, patches=patches, cache_tag=source_hash(), anew=self.options.dump is not None
        )
        taken = [hook for hook in _HOOKS if hook in patches]
        if taken and self._runner.pipeline.ends_with_capture and not self._facts.keeps_limit:
            return compile_graph()
        if taken:
            raise OptionError(
                f"option 'inductor' sets {taken[0]!r}, which dsgraph needs for its own passes; use a GraphPass"
            )
        partitioner = _Partitioner(self._runner, self._facts, self._watch, agree=self._agree)
        patches["custom_partitioner_fn"] = self._partitioner = partitioner
        patches["joint_custom_post_pass"] = InferenceLowering(self._runner, self._facts)
        # A pass whose code cannot be identified, a plan in which other ranks have a say: nothing may come from a cache.
        if self.unidentified or partitioner.uuid() is None:
            patches["force_disable_caches"] = True
        return compile_graph()

    def _compile_eager(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        lowering = InferenceLowering(self._runner, self._facts)

        def compile_inference(graph_module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            lowering(graph_module.graph)
            return self._boxed(graph_module)

        self._partitioner = _Partitioner(self._runner, self._facts, self._watch, agree=self._agree)
        return compile_with_aot(
            gm,
            inputs,
            compiler=lambda graph_module, _: self._boxed(graph_module),
            inference_compiler=compile_inference,
            partition_fn=self._partitioner,
        )

    def _after_phase(self, gm: GraphModule, ctx: PassContext) -> None:
        self._watch.after_phase(gm, ctx)
        if ctx.phase in (Phase.FORWARD, Phase.BACKWARD):
            lines = [f"{ctx.phase.value}: {line}" for line in collective_lines(gm, ctx)]
            self.collectives = [*(self.collectives or []), *lines]


def _records_cuda_graphs(options: BackendOptions, mode: str | None) -> bool:
    """Return whether Inductor records CUDA graphs under these options."""
    return options.codegen == "inductor" and uses_cudagraphs(_settings(options, mode))


def unidentified(options: BackendOptions, pipeline: Pipeline) -> tuple[str, ...]:
    """Return the passes whose code cannot be identified: with one, torch's caches must be off."""
    if options.codegen != "inductor":
        return ()
    return tuple(item.name for item in pipeline if item.fingerprint() is None)


def _settings(options: BackendOptions, mode: str | None) -> dict[str, Any]:
    """Return the changes to Inductor's configuration by the mode and the options."""
    return {**mode_settings(mode), **options.inductor}

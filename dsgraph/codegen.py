"""One compile of one captured graph: runs the capture passes and hands the rest to a code generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from dsgraph.inductor_ext import register_lowerings
from dsgraph.passes import CaptureFacts, InferenceLowering, Partitioner, Phase, Runner
from dsgraph.passes.partitioner import source_hash

from . import compat
from .capture import collective_lines, normalize_markers
from .dump import GraphDump
from .errors import OptionError
from .options import BackendOptions, mode_settings

# The hooks through which Inductor takes the passes; options["inductor"] cannot use them as well.
_HOOKS = ("custom_partitioner_fn", "joint_custom_post_pass")

# Inductor's search for an order of less memory knows nothing of the time that a transfer takes: it puts every wait
# right behind its start again, which took 7 % longer a step (GPT of 27 M parameters, 2 ranks, gloo).
_KEEP_ORDER = ("reorder_for_peak_memory", False)


class Compilation:
    """Compiles one captured graph with the passes of its options.

    Attributes:
        collectives: One line a collective of the lowered graphs; None until they are lowered, and for good when torch's
            cache had the compiled graph.
    """

    def __init__(
        self,
        options: BackendOptions,
        facts: CaptureFacts,
        *,
        number: int,
        mode: str | None,
        boxed: Callable[[GraphModule], Callable[..., Any]] = compat.boxed,
    ) -> None:
        self._options = options
        self._boxed = boxed  # how codegen "eager" runs a graph
        self._facts = facts
        self._mode = mode
        self.collectives: list[str] | None = None
        pipeline = options.pipeline if facts.params else options.pipeline.without_mesh()
        dump = None
        if options.dump is not None:
            dump = GraphDump(options.dump, compile_number=number, strict=options.strict)
        self._runner = Runner(pipeline, sink=dump, after_phase=self._note_collectives)

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Rewrites and compiles `gm`; the result takes the inputs that `gm` takes."""
        normalize_markers(gm)
        self._runner.run(gm, self._facts.context(gm, Phase.CAPTURE, inference=not torch.is_grad_enabled()))
        if self._options.codegen == "eager":
            return self._compile_eager(gm, inputs)
        return self._compile_inductor(gm, inputs)

    def _compile_inductor(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        register_lowerings()
        patches = {**mode_settings(self._mode), **self._options.inductor}
        if self._facts.params:
            patches.setdefault(*_KEEP_ORDER)
        if len(self._runner.pipeline) == 0:
            return compat.compile_with_inductor(gm, inputs, patches=patches, cache_tag=source_hash())
        taken = [hook for hook in _HOOKS if hook in patches]
        if taken:
            raise OptionError(
                f"option 'inductor' sets {taken[0]!r}, which dsgraph needs for its own passes; use a GraphPass"
            )
        partitioner = Partitioner(self._runner, self._facts)
        patches["custom_partitioner_fn"] = partitioner
        patches["joint_custom_post_pass"] = InferenceLowering(self._runner, self._facts)
        if partitioner.uuid() is None:  # a pass whose code cannot be identified: nothing may come from a cache
            patches["force_disable_caches"] = True
        return compat.compile_with_inductor(gm, inputs, patches=patches, cache_tag=source_hash())

    def _compile_eager(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        lowering = InferenceLowering(self._runner, self._facts)

        def compile_inference(graph_module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            lowering(graph_module.graph)
            return self._boxed(graph_module)

        return compat.compile_with_aot(
            gm,
            inputs,
            compiler=lambda graph_module, _: self._boxed(graph_module),
            inference_compiler=compile_inference,
            partition_fn=Partitioner(self._runner, self._facts),
        )

    def _note_collectives(self, gm: GraphModule, phase: Phase) -> None:
        if phase in (Phase.FORWARD, Phase.BACKWARD):
            lines = [f"{phase.value}: {line}" for line in collective_lines(gm, self._facts)]
            self.collectives = [*(self.collectives or []), *lines]

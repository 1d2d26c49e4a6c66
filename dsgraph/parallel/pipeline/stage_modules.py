"""One stage of a pipeline as torch's schedules run it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.weak import WeakIdKeyDictionary

from dsgraph.compat.pipelining import StageOfOtherRanks
from dsgraph.compiler.memory_limit.compile_ahead import compile_ahead
from dsgraph.compiler.request import CompileOutcome
from dsgraph.passes.parallel.stages.stage_graphs import StageGraphModule
from dsgraph.utils.errors import OptionError

from .captured_model import CapturedModel
from .deferred_weights import WeightQueue, defer_weights
from .stage_chain import Keeps, StageChain


class LossOf:
    """The `loss_fn` of torch's schedules: the share of one micro-batch in the mean loss.

    Attributes:
        microbatches: Number of micro-batches of a step.
        scale: The loss scale of float16; 1 without.
        is_function: True if a function outside the model computes the loss.
        is_missing: True if neither the model nor a function computes one.
    """

    def __init__(
        self, loss_fn: Callable[[Any, Any], Tensor] | None, microbatches: int, *, is_missing: bool = False
    ) -> None:
        self._loss_fn, self.microbatches, self.scale = loss_fn, microbatches, 1.0
        self.is_function, self.is_missing = loss_fn is not None, is_missing

    def check(self) -> None:
        """Raise an error if there is no loss for a step.

        Raises:
            OptionError: Neither the model nor a function computes one.
        """
        if self.is_missing:
            raise OptionError(
                "pipeline.step: the model returns no scalar with a gradient: give pipeline loss_fn=, or have the model "
                "return its loss"
            )

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the share as a scalar.

        Args:
            output: The output of the last stage.
            target: The micro-batch's rows of `target`.
        """
        loss: Tensor = output if self._loss_fn is None else self._loss_fn(output, target)
        share = loss / self.microbatches
        return share if self.scale == 1 else share.float() * self.scale


def result_of(captured: CapturedModel, *, is_loss: bool, evaluates: bool = False) -> Node | None:
    """Return the node of the loss, or of the input of `loss_fn`; None if the model returns no loss.

    Args:
        captured: The captured model.
        is_loss: True if the model returns its loss.
        evaluates: True for the forward in `eval()`, whose loss may have no gradient.

    Raises:
        OptionError: The model does not return one tensor for `loss_fn`.
    """
    results = [node for node in captured.results if isinstance(node, Node)]
    if not is_loss:
        if len(results) != 1:
            model = "the model in eval()" if evaluates else "the model"
            raise OptionError(f"pipeline: loss_fn takes one tensor, and {model} returns {len(results)}: return one")
        return results[0]
    scalars = [node for node in results if node.meta["val"].ndim == 0]
    losses = [
        node
        for node in scalars
        if node.meta["val"].requires_grad or (evaluates and node.meta["val"].is_floating_point())
    ]
    return losses[0] if losses else None


class StageModule(nn.Module):
    """A stage as torch's schedules call it: received values by position, root inputs by name.

    Attributes:
        graph_module: The stage's graph.
        roots: Names of the inputs of the model that it reads.
        queue: Gradients of weights that a zero-bubble schedule computes later; None for other schedules.
        deferred: The products of these weights.
        keeps: The blocks that each micro-batch keeps; None: all. It needs a chain.
        whole: Inputs of the running step that each micro-batch gets whole.
        written: The buffers that it writes.
    """

    def __init__(
        self,
        graph_module: StageGraphModule,
        roots: Sequence[str],
        *,
        single: bool,
        defers: bool = False,
        chain: StageChain | None = None,
        written: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.written = [graph_module.get_buffer(name) for name in written]
        self.queue = WeightQueue() if defers else None
        self.deferred = None if self.queue is None else defer_weights(graph_module, self.queue)
        self.graph_module = graph_module
        self.roots, self._single = tuple(roots), single
        self.keeps: Keeps | None = None
        self.whole: Mapping[str, Tensor] = {}
        self._chain = chain
        self._run: Callable[..., Any] = graph_module.__call__ if chain is None else chain.__call__
        self._hooked = WeakIdKeyDictionary()

    def compile_graph(self, options: Mapping[str, Any]) -> None:
        """Let the backend compile the stage when it first runs."""
        if self._chain is not None:
            self._chain.compile_graphs(options)
            return
        compiled: Any = torch.compile(self.graph_module, backend="dsgraph", fullgraph=True, options=dict(options))
        # Not a child module: by those torch recognizes compiled stages, and refuses schedules that split the backward.
        self._run = compiled.__call__

    def compile_ahead(self, received: Sequence[Tensor], inputs: Mapping[str, Tensor]) -> CompileOutcome:
        """Compile the stage for values like those that `forward` takes, without running it."""
        return compile_ahead(self.graph_module, self._call, received, inputs)

    def begin(self, microbatch: int) -> None:
        """Note the micro-batch of the next forward."""
        if self._chain is not None:
            self._chain.keeps = None if self.keeps is None else self.keeps(microbatch)

    def forward(self, *received: Tensor, **inputs: Tensor) -> Any:
        """Return the sent values, contiguous as gloo requires; the last stage returns its one result by itself."""
        for value in received:
            self._gradient_contiguous(value)
        sent = self._call(received, inputs)
        return sent[0] if self._single else tuple(value.contiguous() for value in sent)

    def _call(self, received: Sequence[Tensor], inputs: Mapping[str, Tensor]) -> Sequence[Tensor]:
        given = {**inputs, **self.whole}
        buffers = [buffer.clone() for buffer in self.written]  # a backward may read those of its own micro-batch
        arguments = [*received, *[given[root] for root in self.roots], *buffers]
        results = self._run(*arguments) if self.deferred is None else self.deferred.call(self._run, arguments)
        own = len(results) - len(self.written)
        for buffer, value in zip(self.written, results[own:], strict=True):
            buffer.copy_(value)
        return cast(Sequence[Tensor], results[:own])

    def _gradient_contiguous(self, received: Tensor) -> None:
        """Make the gradient of a received value contiguous: it is sent back, and autograd may give it any strides."""
        if received.requires_grad and received not in self._hooked:  # torch receives into the same tensor every step
            received.register_hook(lambda grad: None if grad is None else grad.contiguous())
            self._hooked[received] = True


class TimedStage(StageOfOtherRanks):
    """One stage for torch's schedules, with a timer of its computation.

    Attributes:
        busy: Seconds by the host's clock since it was set to 0.
    """

    busy = 0.0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a micro-batch, timed; see torch."""
        cast(StageModule, self.submod).begin(fwd_chunk_id)
        return self._timed(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward of a micro-batch, timed; see torch.

        A step may run inside `torch.autocast`, but a backward must run outside it.
        """
        with torch.autocast(self.device.type, enabled=False):
            return self._timed(super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the weight gradients of a micro-batch, timed; see torch."""
        with torch.autocast(self.device.type, enabled=False):
            return self._timed(super().backward_weight_one_chunk, *args, **kwargs)

    def _timed(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            self.busy += time.perf_counter() - started


def stage_buffers(values: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Return empty tensors like fake ones, which tell torch's schedules the values that neighbours send."""
    return tuple(
        torch.empty(value.shape, dtype=value.dtype, device=device).requires_grad_(value.requires_grad)
        for value in values
    )

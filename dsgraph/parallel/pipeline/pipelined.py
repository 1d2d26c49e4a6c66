"""`PipelinedModel`: a model whose layers are on several ranks, made by `dsgraph.pipeline`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsgraph.ranks.equal_batches import EqualBatches, random_state
from dsgraph.utils.errors import OptionError

from .evaluation import Evaluation
from .pipeline_report import PipelineReport
from .stage_chain import Keeps
from .stage_limits import StageLimits
from .stage_modules import LossOf, StageModule
from .stage_parameters import StageParameters
from .stage_runs import StageRuns
from .step_arguments import StepArguments
from .tied_gradients import StepGradients


class PipelinedModel(StageParameters):
    """This rank's stages of a model, and the schedule that runs them.

    Attributes:
        report: How the model was split.
        data_parallel: The ranks that hold the same stages, each with a batch of its own; None without data parallelism.
    """

    def __init__(
        self,
        *,
        runs: StageRuns,
        stages: Mapping[int, StageModule],
        gradients: StepGradients,
        options: Mapping[str, Any] | None,
        evaluation: Callable[..., Evaluation],
        loss: LossOf,
        report: PipelineReport,
        inputs: Mapping[str, int],
        arguments: StepArguments,
        device: torch.device,
        equal: EqualBatches,
        sizes: Mapping[str, torch.Size],
        description: Mapping[str, Any],
        draws: bool,
    ) -> None:
        super().__init__(
            stages=stages, gradients=gradients, report=report, sizes=sizes, description=description, device=device
        )
        self._runs, self._equal, self._draws = runs, equal, draws
        self._make_evaluation, self._loss = evaluation, loss
        self._limits = StageLimits.of(options, stages, report=report, gradients=gradients, loss=loss)
        self._evaluations: dict[bool, Evaluation] = {}  # by `return_outputs`
        self._timed, self._seconds = runs.now().stages, 0.0
        self._inputs, self._arguments = inputs, arguments

    def step(self, *args: Any, target: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Run forward and backward of all micro-batches, and add the gradients of the mean loss to `.grad`.

        Every rank of the pipeline calls it with the same batch; ranks of `data_parallel` each with their own.

        Args:
            *args: The model's arguments, for the complete batch: each tensor's first dimension is `microbatches` times
                that of the example.
            target: The target of `loss_fn`; split along its first dimension like the inputs.
            **kwargs: The model's named arguments.

        Returns:
            The mean loss over the micro-batches, detached, a float32 scalar, the same on every rank.

        Raises:
            OptionError: The arguments are not those of the example, or do not divide into the micro-batches; or there
                is no loss. Raised before anything is sent.
            MemoryLimitError: The stages cannot keep the option `memory_limit`. All ranks raise before the first step.
            StrictError: With `strict`, a stage is not planned, or gradients of an earlier step exceed the memory that
                `memory_limit` leaves. All ranks raise.
        """
        self._loss.check()
        leaves = self._arguments.leaves("step", args, kwargs, target)
        inputs = {name: leaves[number].to(self._device) for name, number in self._inputs.items()}
        count = self.report.microbatches
        stand_in = torch.zeros(count, device=self._device) if target is None else target.to(self._device)
        self._compare(self._runs.autocast(), inputs if target is None else {**inputs, "target": target})
        run = self._runs.now()
        if self._limits is not None:
            memory = self._limits.keep(self._runs.autocast(), run, inputs)
            self.report = replace(self.report, memory=memory)
        self._gradients.begin()
        losses: list[Tensor] = []
        self._timed = run.stages
        for stage in self._timed:
            stage.busy = 0.0
        started = time.perf_counter()
        try:
            run.schedule.step(**inputs, target=stand_in, losses=losses, return_outputs=False)
        except BaseException:
            self._runs.drop()
            self._gradients.abandon()
            raise
        self._seconds = time.perf_counter() - started
        return self._gradients.finish(
            sum((loss.detach().float() for loss in losses), torch.zeros((), device=self._device)) / self._loss.scale
        )

    def scale_loss(self, scale: float) -> None:
        """Multiply the loss and the gradients of later steps by a number. `step` returns the unscaled loss."""
        self._loss.scale = scale

    def leave_out(self, keeps: Keeps) -> None:
        """Let the micro-batches of later steps leave out blocks of `Techniques.drops`."""
        for stage in self._stages.values():
            stage.keeps = keeps

    def evaluate(self, *args: Any, target: Tensor | None = None, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return the mean loss of the model's forward in `eval()`, and its output if asked for.

        The first call captures that forward; so does the first with `return_outputs`. Ranks call it as they call
        `step`. `.grad` of parameters does not change.

        Args:
            *args: See `step`.
            target: See `step`. With `return_outputs` it may be left out: then there is no loss.
            return_outputs: True returns the loss and the output. The output is the model's own, such as
                transformers' `ModelOutput`, on the ranks that have the last stage, and None on the others, because
                logits are large. Tensors of the micro-batches are concatenated along their first dimension;
                floating-point scalars are averaged, and other scalars get a dimension. The output has the rows that
                this rank gave. Objects other than tensors, numbers and texts, such as a cache, are None.
            **kwargs: See `step`.

        Returns:
            The mean loss over the micro-batches, a float32 scalar, the same on every rank. With `return_outputs`, the
            pair of it and the output; the loss is None if there is none.

        Raises:
            OptionError: See `step`. Or there is no loss, without `return_outputs`.
            PartitionError: The forward in `eval()` cannot be captured; or its output is an object of a class that
                torch's pytrees do not know.
            PassError: It reads parameters in another order than that of training, and cannot be cut.
        """
        leaves = self._arguments.leaves("evaluate", args, kwargs, target, needs_loss=not return_outputs)
        self._compare(
            f"evaluation, {self._runs.autocast()}",
            {**self._arguments.by_name(leaves), "target": target},
        )
        if return_outputs not in self._evaluations:
            self._evaluations[return_outputs] = self._make_evaluation(returns_outputs=return_outputs)
        with self._gradients.evaluating():
            loss, output = self._evaluations[return_outputs].run(leaves, target)
        if loss is not None:
            self._gradients.average(loss)
        return (loss, output) if return_outputs else loss

    def _compare(self, kind: str, given: Mapping[str, Any]) -> None:
        """Compare the batches of ranks that need equal ones, in the first steps of a kind."""
        if self._equal.is_due(kind):
            self._equal.compare(kind, given)
            if self._draws:
                self._equal.compare_random_numbers(self._device, random_state(self._device))

    def measured_bubble(self) -> float:
        """Return the share of the last step's time in which the pipeline's ranks waited or sent instead of computing.

        All ranks of the pipeline call it together. `dsgraph schedule` predicts it.

        Raises:
            OptionError: No step has run; or the device is a GPU, where the host's clock does not show when kernels run.
        """
        if not self._seconds:
            raise OptionError("pipeline.measured_bubble: no step has run yet: call it after step()")
        if self._device.type != "cpu":
            raise OptionError(
                f"pipeline.measured_bubble: it measures CPUs, but stages run on {self._device}: use a profiler"
            )
        busy = sum(stage.busy for stage in self._timed)
        return 1 - self._gradients.sum_over_pipeline(busy) / self._gradients.sum_over_pipeline(self._seconds)

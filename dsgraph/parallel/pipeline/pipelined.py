"""`PipelinedModel`: a model whose layers are on several ranks, made by `dsgraph.pipeline`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsgraph.ranks.equal_batches import EqualBatches, random_state
from dsgraph.utils.errors import OptionError

from .evaluation.evaluation import Evaluation
from .evaluation.generation import Generation
from .pipeline_report import PipelineReport
from .stage_chain import Keeps
from .stage_limits import StageLimits
from .stage_modules import LossOf, StageModule
from .stage_parameters import StageParameters
from .stage_runs import StageRun, StageRuns
from .step_arguments import StepArguments, StepInputs
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
        generation: Generation,
        loss: LossOf,
        report: PipelineReport,
        inputs: Mapping[str, int],
        arguments: StepArguments,
        device: torch.device,
        equal: EqualBatches,
        sizes: Mapping[str, torch.Size],
        description: Mapping[str, Any],
        draws: bool,
        seeds: int,
    ) -> None:
        super().__init__(
            stages=stages, gradients=gradients, report=report, sizes=sizes, description=description, device=device
        )
        self._runs, self._equal, self._draws = runs, equal, draws
        self._make_evaluation, self._generation, self._loss = evaluation, generation, loss
        self._limits = StageLimits.of(options, stages, report=report, gradients=gradients, loss=loss)
        self._evaluations: dict[bool, Evaluation] = {}  # by `return_outputs`
        self._timed, self._seconds = runs.now().stages, 0.0
        self._inputs, self._arguments, self._seeds = inputs, arguments, seeds

    def step(self, *args: Any, target: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Run forward and backward of all micro-batches, and add the gradients of the mean loss to `.grad`.

        Every rank of the pipeline calls it with the same batch; ranks of `data_parallel` each with their own.

        Args:
            *args: The model's arguments, for the complete batch. A tensor with `microbatches` times the rows of the
                example is split along its first dimension. A tensor of the example's shape, such as a table of class
                weights, is given whole to each micro-batch, and so are tensors without dimensions. Other values are
                those of the example.
            target: The target of `loss_fn`; split along its first dimension like the inputs.
            **kwargs: The model's named arguments.

        Returns:
            The mean loss over the micro-batches, detached, a float32 scalar, the same on every rank.

        Raises:
            OptionError: The arguments are not those of the example, do not divide into the micro-batches, or are all
                those of one micro-batch; or there is no loss. Raised before anything is sent.
            MemoryLimitError: The stages cannot keep the option `memory_limit`. All ranks raise before the first step.
            StrictError: With `strict`, a stage is not planned, or gradients of an earlier step exceed the memory that
                `memory_limit` leaves. All ranks raise.
        """
        self._loss.check()
        leaves = self._checked("step", self._runs.autocast(), args, kwargs, target)
        count = self.report.microbatches
        stand_in = torch.zeros(count, device=self._device) if target is None else target.to(self._device)
        inputs = self._arguments.inputs(leaves, self._inputs, self._device, seeds=self._seeds)
        run = self._runs.now()
        if self._limits is not None:
            memory = self._limits.keep(self._runs.autocast(), run, inputs)
            self.report = replace(self.report, memory=memory)
        losses = self._scheduled(run, inputs, stand_in)
        return self._gradients.finish(
            sum((loss.detach().float() for loss in losses), torch.zeros((), device=self._device)) / self._loss.scale
        )

    def _scheduled(self, run: StageRun, inputs: StepInputs, target: Tensor) -> list[Tensor]:
        """Run the schedule. Return the losses of the micro-batches; empty on ranks without the last stage."""
        self._gradients.begin()
        losses: list[Tensor] = []
        self._timed = run.stages
        for stage in self._timed:
            stage.busy = 0.0
        for module in self._stages.values():
            module.whole = inputs.whole
        started = time.perf_counter()
        try:
            run.schedule.step(**inputs.split, target=target, losses=losses, return_outputs=False)
        except BaseException:
            self._runs.drop()
            self._gradients.abandon()
            raise
        finally:
            for module in self._stages.values():
                module.whole = {}
        self._seconds = time.perf_counter() - started
        return losses

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
        kind = f"evaluation, {self._runs.autocast()}"
        leaves = self._checked("evaluate", kind, args, kwargs, target, needs_loss=not return_outputs)
        if return_outputs not in self._evaluations:
            self._evaluations[return_outputs] = self._make_evaluation(returns_outputs=return_outputs)
        with self._gradients.evaluating():
            loss, output = self._evaluations[return_outputs].run(self._arguments, leaves, target)
        if loss is not None:
            self._gradients.average(loss)
        return (loss, output) if return_outputs else loss

    def generate(self, input_ids: Tensor, **arguments: Any) -> Any:
        """Generate tokens by transformers' `generate`, with a causal model of transformers.

        There is no cache: each new token costs an evaluation of `microbatches` micro-batches at the full length of the
        example, however short the prompts are. Use it to look at a model in training; to serve one, export it and use
        `init_inference`. The first call evaluates once more, to check that the model is causal. Ranks call it as they
        call `evaluate`; ranks of `data_parallel` each with prompts of their own.

        Args:
            input_ids: Prompts (rows, length): at most the rows of a batch, beams and returned sequences included.
                With the new tokens they are at most as long as the example. Prompts of several lengths are padded on
                the left, with `attention_mask=`; the example then contains `attention_mask` and `position_ids`.
            **arguments: Those of transformers' `generate`: `max_new_tokens`, `do_sample`, `temperature`, `top_k`,
                `eos_token_id`, `pad_token_id` and others.

        Returns:
            What transformers' `generate` returns, the same on all ranks of the pipeline.

        Raises:
            OptionError: The model is not causal or not of transformers, or an argument is not supported.
            PartitionError: See `evaluate`.
            RanksDisagreeError: Ranks of the pipeline were given different arguments, or would sample with different
                random numbers.
        """
        with self._equal.refusals("generate"):
            draws = self._generation.check(input_ids, arguments)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in arguments.items() if isinstance(value, (int, float, str))}
        self._equal.compare(f"generate with {sorted(plain.items())}", {"input_ids": input_ids, **tensors})
        if draws:
            self._equal.compare_random_numbers(self._device, random_state(self._device), samples=True)
        copies = self.data_parallel
        return self._generation.run(
            input_ids, arguments, self._logits, is_synced=copies is not None and copies.size() > 1
        )

    def _logits(self, position: int, **arguments: Any) -> Tensor:
        """Return the logits at a position (rows, vocabulary), in float32, on all ranks of the pipeline."""
        _, output = self.evaluate(return_outputs=True, **arguments)
        last = sum(map(len, self.report.stages_of_ranks)) - 1
        source = next(rank for rank, stages in enumerate(self.report.stages_of_ranks) if last in stages)
        found = getattr(output, "logits", None)
        shape = arguments["input_ids"].shape
        size = torch.zeros((), dtype=torch.int64, device=self._device)
        if isinstance(found, Tensor) and found.ndim == 3 and found.shape[:2] == shape:
            size.fill_(found.shape[2])
        dist.broadcast(size, group=self._gradients.pipeline, group_src=source)
        if not size:
            raise OptionError(f"pipeline.generate: the model's output has no logits of the {shape[1]} positions")
        logits = torch.empty(shape[0], int(size), device=self._device)
        if found is not None:
            logits.copy_(found[:, position])
        dist.broadcast(logits, group=self._gradients.pipeline, group_src=source)
        return logits

    def _checked(self, call: str, kind: str, *given: Any, needs_loss: bool = True) -> list[Any]:
        """Return the leaves of the arguments of a call, which are compared in the first steps of a kind.

        Args:
            call: The method that was called.
            kind: Key of the steps that are counted together.
            *given: Its positional and named arguments, and its target.
            needs_loss: False if the target may be left out.
        """
        is_due = self._equal.is_due(kind)
        with self._equal.refusals(kind) if is_due else nullcontext():
            leaves = self._arguments.leaves(call, *given, needs_loss=needs_loss)
        if is_due:
            self._equal.compare(kind, {**self._arguments.by_name(leaves), "target": given[-1]})
            for device in dict.fromkeys((torch.device("cpu"), self._device)) if self._draws else ():  # seeds, the rest
                self._equal.compare_random_numbers(device, random_state(device))
        return leaves

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

"""`PipelinedModel`: a model whose layers are on several ranks, made by `dsgraph.pipeline`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsgraph.checkpoint.model_tensors import ModelTensors, copy_into
from dsgraph.checkpoint.model_training import ModelTraining
from dsgraph.compat.process_groups import group_timeout
from dsgraph.optim.gradient_norm import LocalGradients
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.equal_batches import EqualBatches, random_state
from dsgraph.utils.errors import OptionError

from .evaluation import Evaluation
from .pipeline_report import PipelineReport
from .stage_limits import StageLimits
from .stage_modules import LossOf, StageModule
from .stage_runs import StageRuns
from .step_arguments import StepArguments
from .tied_gradients import StepGradients


class PipelinedModel:
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
        evaluation: Callable[[], Evaluation],
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
        self.report, self.data_parallel = report, gradients.copies
        self._runs, self._stages, self._gradients, self._equal = runs, stages, gradients, equal
        self._make_evaluation, self._loss = evaluation, loss
        self._limits = StageLimits.of(options, stages, report=report, gradients=gradients, loss=loss)
        self._evaluation: Evaluation | None = None
        self._sizes, self._description, self._draws = sizes, description, draws
        self._timed, self._seconds = runs.now().stages, 0.0
        self._inputs, self._arguments, self._device = inputs, arguments, device

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
            OptionError: The arguments are not those of the example, or do not divide into the micro-batches. Raised
                before anything is sent.
            MemoryLimitError: The stages cannot keep the option `memory_limit`. All ranks raise before the first step.
            StrictError: With `strict`, a stage is not planned, or gradients of an earlier step exceed the memory that
                `memory_limit` leaves. All ranks raise.
        """
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

    def evaluate(self, *args: Any, target: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the mean loss of the model's forward in `eval()`. `.grad` of parameters does not change.

        The first call captures that forward. Ranks call it as they call `step`.

        Args:
            *args: See `step`.
            target: See `step`.
            **kwargs: See `step`.

        Returns:
            The mean loss over the micro-batches, a float32 scalar, the same on every rank.

        Raises:
            OptionError: See `step`.
            PartitionError: The forward in `eval()` cannot be captured.
            PassError: It reads parameters in another order than that of training, and cannot be cut.
        """
        leaves = self._arguments.leaves("evaluate", args, kwargs, target)
        self._compare(
            f"evaluation, {self._runs.autocast()}",
            {**self._arguments.by_name(leaves), "target": target},
        )
        if self._evaluation is None:
            self._evaluation = self._make_evaluation()
        with self._gradients.evaluating():
            loss = self._evaluation.run(leaves, target)
        return self._gradients.average(loss)

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

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under their names in the model, each once. With ZeRO these are its shards."""
        if self._gradients.sharded is not None:
            yield from self._gradients.sharded.shards.named_parameters()
            return
        seen: set[int] = set()
        for stage in self._stages.values():
            for name, parameter in stage.graph_module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters (with ZeRO its shards) and buffers under their names in the model, detached."""
        found: dict[str, Tensor] = {}
        for stage in self._stages.values():
            found.update(stage.graph_module.state_dict())
        return found | {name: parameter.detach() for name, parameter in self.named_parameters()}

    def full_parameters(self) -> dict[str, Tensor]:
        """Return the full parameters of this rank's stages, by their names in the model, in memory of their own.

        The ranks that hold the same stages call it together.
        """
        tensors = self.checkpoint_tensors()
        full = {name: tensors.full(name, value.detach()) for name, value in self.named_parameters()}
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in full.items()
        }

    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        optimizer: Optimizer | None = None,
        *,
        tag: str = "state",
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Save parameters, buffers and an optimizer, for any layout. All ranks call it.

        The format is that of an engine's checkpoints. During the call a rank holds the full tensors of its
        tensor-parallel slices. A checkpoint of the same tag is replaced when the new one is complete.

        Args:
            folder: A folder on a file system that all ranks share.
            optimizer: An optimizer of `parameters()`.
            tag: Name of the checkpoint in the folder.
            more: Values that `load_checkpoint` returns, of the types that `client_state` of an engine keeps.

        Raises:
            CheckpointError: It could not be written; all ranks raise.
        """
        ModelTraining(self.agreement, self.checkpoint_tensors, optimizer).save(Path(folder), tag, more)

    def load_checkpoint(
        self, folder: str | os.PathLike[str], optimizer: Optimizer | None = None, *, tag: str = "state"
    ) -> dict[str, Any]:
        """Load a checkpoint of this or any other layout, converted to this model's dtypes. All ranks call it.

        Args:
            folder: Folder of checkpoints.
            optimizer: An optimizer of `parameters()`, of the class that was saved or one with no other options. Its
                state and options are loaded, and in the same layout random states. None: only the model is loaded.
            tag: Name of the checkpoint in the folder.

        Returns:
            The argument `more` of `save_checkpoint`.

        Raises:
            CheckpointError: There is no such checkpoint, it is damaged, or it is not of this model. All ranks
                raise; nothing was changed.
        """
        found = ModelTraining(self.agreement, self.checkpoint_tensors, optimizer).load(Path(folder), tag)
        assert found is not None, "a tag was given"
        return found[1]

    @property
    def agreement(self) -> Agreement:
        """The ranks that save and load together: all ranks."""
        world = dist.group.WORLD
        assert world is not None
        return Agreement(tuple(range(dist.get_world_size())), group_timeout(world, self._device.type))

    def checkpoint_tensors(self) -> ModelTensors:
        """Return this rank's parameters and buffers as a checkpoint stores them."""
        values: dict[str, Tensor] = {name: parameter.detach() for name, parameter in self.named_parameters()}
        for stage in self._stages.values():
            values.update(pair for pair in stage.graph_module.named_buffers() if pair[0] in self._sizes)
        pp, dp = len(self.report.stages_of_ranks), self.data_parallel.size() if self.data_parallel else 1
        return ModelTensors(
            parameters=dict(self.named_parameters()),
            values=values,
            sizes=self._sizes,
            description=self._description,
            put=partial(copy_into, values),
            layout={"dp": dp, "tp": dist.get_world_size() // (dp * pp), "pp": pp},
            slices=self._gradients.slices,
        )

    def zero_grad(self) -> None:
        """Set this rank's gradients to None."""
        for parameter in self.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all ranks' gradients so that their joint 2-norm is at most `max_norm`; a tied parameter counts once.

        All ranks call it together. If a gradient is not finite, all gradients stay as they are.

        Returns:
            The norm before, a float32 scalar, the same on every rank.
        """
        norm = self.local_gradients().unscale_and_clip(scale=1.0, max_norm=max_norm)
        return torch.tensor(norm, dtype=torch.float32, device=self._device)

    def local_gradients(self) -> LocalGradients:
        """Return this rank's part of the step's gradients."""
        return self._gradients.local(dict(self.named_parameters()))

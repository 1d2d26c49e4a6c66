"""The engine: it owns the step of a partitioned and compiled model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dsgraph.batches import call_with
from dsgraph.checkpoint.asynchronous_save import Writer
from dsgraph.checkpoint.step_counts import StepCounts
from dsgraph.optim.gradient_norm import LocalGradients, gradients_of
from dsgraph.optim.hooks import hooks_of
from dsgraph.partitioning.accumulation.accumulate import accumulate, discard
from dsgraph.partitioning.forward_inputs import cast_floating
from dsgraph.utils.errors import EngineError

from .config.read_config import ResolvedConfig
from .data import RankLoader, batches_of, next_of_step
from .integrations.mpu import ModelParallel
from .loss_scale import LossScale
from .model_outputs import Again, loss_of
from .monitoring.metrics import Figures
from .monitoring.step_logger import Looks
from .optimizers.step_moment import stepping
from .saving import Saving
from .techniques.eigenvalues import Gradients
from .techniques.layer_drop import ProgressiveLayerDrop
from .techniques.quantize_training import QuantizedTraining
from .weights import Weights


class Engine(Figures, Saving, Weights, nn.Module):
    """Runs forward, backward and step of a model as a configuration says.

        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

    `step` is called for each micro-batch; the optimizer steps at the last one of a step. Until then gradients wait as
    `dsgraph.accumulate` has it.

    Attributes:
        module: The model, partitioned.
        optimizer: The optimizer of its shards.
        lr_scheduler: What is stepped behind it, if anything.
        loss_scale: What the loss is multiplied by.
        counts: How far training is.
        training_dataloader: The loader of the training data that `initialize` was given, if any.
        quantized_training: Takes bits from weights; None where nobody asks.
        progressive_layer_drop: Leaves out blocks of the model in training; None where nobody asks.
        boundary: Says whether the micro-batch that runs is the last one of its step; None: the counts say it.
    """

    def __init__(
        self,
        module: nn.Module,
        runs: Callable[..., Any],
        resolved: ResolvedConfig,
        looks: Looks,
        *,
        optimizer: Optimizer,
        lr_scheduler: Any = None,
        dtype: torch.dtype | None = None,
        loader: RankLoader | None = None,
        shared: ModelParallel | None = None,
        layer_drop: ProgressiveLayerDrop | None = None,
        quantized_training: QuantizedTraining | None = None,
    ) -> None:
        """Puts the parts together; `initialize` makes them.

        Args:
            module: The partitioned model.
            runs: The model, compiled.
            resolved: The configuration.
            looks: Sees each step.
            optimizer: Of the model's shards.
            lr_scheduler: Has `step()`.
            dtype: Dtype of floating-point inputs; None leaves them.
            loader: Of the training data.
            shared: The ranks that share a model which its own code has sliced.
            layer_drop: See the class.
            quantized_training: Likewise.
        """
        super().__init__()
        self.module = module
        self.training_dataloader = loader
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.resolved = resolved
        self.loss_scale = LossScale.of(resolved.config.fp16)
        self.counts = StepCounts()
        self.boundary: Callable[[], bool] | None = None
        self._runs = (runs,)  # in a tuple: nn.Module would take it for a second submodule
        self._dtype = dtype
        self._waiting = ExitStack()
        self._is_waiting = self._never_reduces = False
        self._norm: float | None = None
        self._was_skipped = self._has_begun_step = self._ran_backward = False
        self._looks, self._shared = looks, shared
        self.progressive_layer_drop, self.quantized_training = layer_drop, quantized_training
        self._again: Again | None = None
        hooks_of(optimizer).set_scale(self.loss_scale.scale)
        self._writer = Writer()

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before they were clipped.

        None where nothing asked for it, and behind the warm-up of a 1-bit optimizer: there no rank sees the averaged
        gradient.
        """
        return self._norm

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch that runs is the last one of its step."""
        if self.boundary is not None:
            return self.boundary()
        return (self.counts.micro + 1) % self.gradient_accumulation_steps() == 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model. In training, what follows belongs to a micro-batch of the current step."""
        (runs,) = self._runs
        args, kwargs = cast_floating((args, kwargs), self._dtype)
        if not self.training or not torch.is_grad_enabled():
            return runs(*args, **kwargs)
        if self.progressive_layer_drop is not None:
            kwargs = {**kwargs, **self.progressive_layer_drop.begin(self.counts)}
        if self.quantized_training is not None and self.quantized_training.blocks:
            self._again = Again(lambda: runs(*args, **kwargs))
        with self._looks.forward(self, args, kwargs):
            self._wait_if_needed()
            return runs(*args, **kwargs)

    def _wait_if_needed(self) -> None:
        """Enters `accumulate` for a micro-batch that is not the last; leaves that of a forward without a backward."""
        waits = self._never_reduces or not self.is_gradient_accumulation_boundary()
        if self._is_waiting and not waits:
            self._leave()
        elif waits and not self._is_waiting:
            self._waiting.enter_context(accumulate(self.module, reduce_once=self._never_reduces or None))
            self._is_waiting = True
        if not waits and self._takes_in_momenta() and not self.config.dsgraph.compile:
            with accumulate(self.module):  # a momentum takes in one gradient, however often a forward reads a parameter
                pass

    def _takes_in_momenta(self) -> bool:
        return hooks_of(self.optimizer).is_compressing

    def backward(self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Adds the gradients of a micro-batch.

        Args:
            loss: A number, the mean over the micro-batch's samples.
            retain_graph: As `torch.autograd.backward` has it.
            scale_wrt_gas: Whether to divide the loss by the micro-batches of a step; if not, its caller has.

        Returns:
            The loss, divided.

        Raises:
            EngineError: `loss` is not one number, or has no graph.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise EngineError(f"backward takes a loss, which is one number, and found {found}")
        if not loss.requires_grad:
            raise EngineError("backward: the loss has no graph: run engine(...) with gradients enabled")
        share = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        try:
            scaled = share if self.loss_scale.scale == 1 else share.float() * self.loss_scale.scale
            is_last = not retain_graph and not self._never_reduces and self.is_gradient_accumulation_boundary()
            beside = stepping(self.optimizer, self.config, is_last=is_last)
            with self._looks.stopwatch.part("backward"), beside:
                scaled.backward(retain_graph=retain_graph)
        finally:
            self._leave()
            self._has_begun_step = self._ran_backward = True
        self._looks.take_loss(share)
        return share

    def _leave(self) -> None:
        self._is_waiting = False
        self._waiting.close()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are added up and not reduced, however many micro-batches there are; `step` is an error.

        Raises:
            EngineError: The stage cannot keep full gradients.
        """
        zero = self._partition.zero
        if not zero.may_reduce_once:
            raise EngineError(
                f"no_sync: at stage {zero.number} no rank holds a full parameter whose gradient it could keep: set "
                "gradient_accumulation_steps instead, or zero_optimization.stage to 2"
            )
        self._never_reduces = True
        try:
            yield
        finally:
            self._never_reduces = False

    def step(self) -> None:
        """Ends a micro-batch; at the last one of a step, updates the parameters.

        Raises:
            EngineError: Inside `no_sync`; or the gradients are not those of `backward`.
            LossScaleError: See `LossScale.update`.
        """
        if self._never_reduces:
            raise EngineError("step inside no_sync: call it behind, when a backward outside has reduced the gradients")
        is_last = self.is_gradient_accumulation_boundary()
        if is_last and not self._ran_backward and any(param.grad is not None for param in self.module.parameters()):
            raise EngineError(
                "step: the gradients are not those of engine.backward(loss), which scales the loss and divides it by "
                "the micro-batches of a step: call it in place of loss.backward()"
            )
        if is_last:
            with self._looks.stopwatch.part("step"):
                self._step()
        self.counts.micro += 1
        self._has_begun_step, self._ran_backward = not is_last, self._ran_backward and not is_last
        if is_last:
            self._looks.after_step(self, self._norm)

    def _step(self) -> None:
        hooks_of(self.optimizer).start_reading()
        is_finite = self._prepare_gradients()
        if is_finite:
            self.optimizer.step()
        else:
            hooks_of(self.optimizer).finish()
        self._looks.weigh(self)
        self.optimizer.zero_grad()
        self.counts.steps += 1
        self.counts.skipped += not is_finite
        self._was_skipped = not is_finite
        if is_finite and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        if is_finite and self.quantized_training is not None:
            self.quantized_training.after_step(self._gradients_again)
        self.loss_scale.update(overflow=not is_finite)
        hooks_of(self.optimizer).set_scale(self.loss_scale.scale)

    def _gradients_again(self) -> Gradients:
        assert self._again is not None
        return self._again.gradients_of(self.module, scale=self.loss_scale.scale)

    def _prepare_gradients(self) -> bool:
        """Unscales and clips; False where the step is to be skipped."""
        config = self.config
        checks = config.fp16.enabled or (config.bf16.enabled and config.bf16.check_grad_overflow)
        if self._takes_in_momenta():
            self._norm = None
            return not checks or math.isfinite(self._gradients().norm())
        if not checks and not config.gradient_clipping:
            return True
        scale, largest = self.loss_scale.scale, config.gradient_clipping
        self._norm = self._gradients().unscale_and_clip(scale=scale, max_norm=largest)
        return not checks or math.isfinite(self._norm)

    def _gradients(self) -> LocalGradients:
        if self._shared is None:
            return gradients_of(self._partition)
        return gradients_of(self._partition, sliced=self._shared.sliced, slicing=self._shared.group.group_name)

    def train_batch(self, data: Iterator[Any] | None = None) -> Tensor:
        """All micro-batches of one step.

        Args:
            data: Gives a micro-batch at a time: the model's argument, a tuple of them, or a dict of keywords. None:
                those of `training_dataloader`, epoch after epoch.

        Returns:
            The mean of the micro-batches' losses on this rank, detached.

        Raises:
            EngineError: There is no data, or it ends within a step, which is dropped.
        """
        data = batches_of(self.training_dataloader) if data is None else data
        total = torch.zeros((), device=self._partition.parameters[0].param.device)
        for number in range(self.gradient_accumulation_steps()):
            try:
                batch = next_of_step(data, number, self.gradient_accumulation_steps())
            except EngineError:
                self.zero_grad()
                self.counts.micro -= number
                raise
            loss = loss_of(call_with(self, batch))
            total += self.backward(loss).detach()
            self.step()
        return total

    def eval_batch(self, data: Iterator[Any]) -> Any:
        """What the model gives for one micro-batch, without gradients."""
        with torch.no_grad():
            return call_with(self, next(data))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the current step. The count of micro-batches goes on."""
        discard(self.module)
        self.optimizer.zero_grad(set_to_none)
        self._has_begun_step = self._ran_backward = False

    def has_begun_step(self) -> bool:
        """Whether there are gradients of a step that is not over."""
        return self._has_begun_step

    def close(self) -> None:
        """Release the compiled model, gradients, the loader's processes, and optimizer state on disk.

        The partitioned model stays. Its parameters on disk, if any, stay there as long as the model lives.
        A checkpoint that is being written is waited for: then all ranks call it at the same point.

        Raises:
            CheckpointError: That checkpoint could not be written.
        """
        try:
            self._writer.close(self.module)
        finally:
            self._give_up()

    def _give_up(self) -> None:
        self._leave()
        if self.training_dataloader is not None:
            self.training_dataloader.end_loop()
        self._runs = (self.module,)
        hooks_of(self.optimizer).finish()
        if self.progressive_layer_drop is not None:
            self.progressive_layer_drop.let_go()
        self._looks.close()
        self.optimizer.zero_grad()
        hooks_of(self.optimizer).close()

"""The engine: it owns the step of a partitioned and compiled model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.optim.hooks import hooks_of
from dsgraph.utils.errors import EngineError

from .data import batches_of
from .engine_info import EngineInfo
from .monitoring.step_logger import StepLogger
from .saving import Checkpoints
from .step_strategy import StepStrategy
from .training_state import TrainingState

SHARD_BYTES = 5 * 10**9
"""Largest size of a weights file in bytes, by default: that of transformers."""


class Engine(EngineInfo):
    """A training engine: forward, backward and step of a model, as a configuration says.

        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

    `step` is called for each micro-batch; the optimizer steps at the last one of a step. Until then gradients are
    accumulated as by `dsgraph.accumulate`. `train_batch` runs all micro-batches of a step. With pipeline stages it is
    the only way to train: the schedule of the pipeline decides what runs when.
    """

    def __init__(
        self, state: TrainingState, strategy: StepStrategy, logger: StepLogger, checkpoints: Checkpoints
    ) -> None:
        """Put the parts together; `initialize` makes them.

        Args:
            state: The model, the optimizer and the progress, shared by all parts.
            strategy: Computes the gradients of a step.
            logger: Observes each step.
            checkpoints: Saves and loads the state.
        """
        super().__init__(state, logger)
        self._strategy, self._checkpoints = strategy, checkpoints

    def train(self, mode: bool = True) -> Engine:
        """Set the engine and the model to training mode, or to evaluation mode.

        Raises:
            EngineError: With pipeline stages, which keep the mode in which the model was captured.
        """
        call = "engine.train" if mode else "engine.eval"
        self._refuse_stages(
            call,
            "stages train in the mode that the model had in initialize: set it before. engine.eval_batch(data) runs "
            "the forward that the model has in eval()",
        )
        return super().train(mode)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters and buffers of this rank, as `torch.nn.Module` does.

        Raises:
            EngineError: With pipeline stages.
        """
        self._refuse_stages("engine.load_state_dict", "save with engine.save_checkpoint, load with load_checkpoint")
        return super().load_state_dict(state_dict, strict, assign)

    def apply(self, fn: Callable[[nn.Module], None]) -> Engine:
        """Call a function for each module, as `torch.nn.Module` does.

        Raises:
            EngineError: With pipeline stages.
        """
        self._refuse_stages("engine.apply", "call model.apply before initialize")
        return super().apply(fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Engine:
        """Convert or move tensors, for `to`, `half`, `cuda` and others of `torch.nn.Module`."""
        self._refuse_stages("moving or converting the engine", "convert the model before initialize")
        return super()._apply(fn, recurse)

    def _refuse_stages(self, call: str, remedy: str) -> None:
        if not isinstance(self.module, nn.Module):
            raise EngineError(f"{call} is not supported with pipeline stages: {remedy}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. In training, what follows belongs to a micro-batch of the current step.

        Raises:
            EngineError: With pipeline stages, as `backward`, `step` and `no_sync`.
        """
        return self._strategy.forward(args, kwargs, is_training=self.training)

    def backward(self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of a micro-batch.

        Args:
            loss: A number, the mean over the micro-batch's samples.
            retain_graph: As for `torch.autograd.backward`.
            scale_wrt_gas: True divides the loss by the number of micro-batches of a step; with False the caller has
                done so.

        Returns:
            The loss, divided.

        Raises:
            EngineError: `loss` is not one number, or has no graph.
        """
        return self._strategy.backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients inside the block without reducing them, for any number of micro-batches.

        `step` inside the block is an error.

        Raises:
            EngineError: The stage cannot keep full gradients.
        """
        with self._strategy.without_reduction():
            yield

    def step(self) -> None:
        """End a micro-batch; at the last one of a step, update the parameters.

        Raises:
            EngineError: Inside `no_sync`; or the gradients are not those of `backward`.
            LossScaleError: See `LossScale.update`.
        """
        self._strategy.end_micro_batch()

    def train_batch(self, data: Iterator[Any] | None = None) -> Tensor:
        """Run all micro-batches of one step.

        Args:
            data: Yields one micro-batch at a time: the model's argument, a tuple of them, or a dict of keywords. None:
                those of `training_dataloader`, epoch after epoch. With the section `parallel`, micro-batches are equal
                on all ranks but those of `dp`.

        Returns:
            The mean of the micro-batches' losses on this rank, detached; with the section `parallel` over all ranks.

        Raises:
            EngineError: There is no data, or it ends within a step, which is dropped.
            OptionError: With pipeline stages, a micro-batch is not like the example.
        """
        return self._strategy.train_batch(batches_of(self.training_dataloader) if data is None else data, self)

    def eval_batch(self, data: Iterator[Any], return_logits: bool = False) -> Any:
        """Return the model's output for one micro-batch, without gradients.

        With the section `parallel`, as in DeepSpeed: run the model's forward in `eval()` for the micro-batches of a
        step, and return the mean of their losses over all ranks.

        Args:
            data: See `train_batch`.
            return_logits: True returns a pair: the loss, and the model's output, which has the logits. With the section
                `parallel` the output is that of all micro-batches; with pipeline stages it is on the ranks of the last
                stage, and None on the others, see `PipelinedModel.evaluate`.
        """
        return self._strategy.evaluate(data, self, return_logits=return_logits)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the current step. The count of micro-batches goes on."""
        self._strategy.discard(set_to_none=set_to_none)

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | int | float | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        asynchronous: bool = False,
    ) -> bool:
        """Write model, optimizer, schedule, scale, counts and random numbers. All ranks call it at the same point.

        If it is interrupted, the checkpoint before stays complete, and the latest.

        Args:
            save_dir: Folder of checkpoints, the same on all ranks.
            tag: Name of the checkpoint; None: `global_step<N>`. If ranks differ, the first rank's tag is used, or
                all ranks raise, see `checkpoint.tag_validation` in the configuration.
            client_state: A dict of values that `load_checkpoint` returns with their types: numbers, text, bytes, paths,
                tensors, arrays, and dicts, lists, tuples and sets of them. The first rank's values are saved.
            asynchronous: True returns when the tensors are copied, and writes the copies while training continues.
                The checkpoint is complete when `wait_for_checkpoint` returns, which the next save or load calls, or
                when the program has ended.

        Returns:
            True.

        Raises:
            CheckpointError: It could not be written, and what was written is removed; or the one before it that is
                asynchronous; all ranks raise. Or a step is not over, whose gradients no checkpoint holds; another job
                writes the same checkpoint; `client_state` holds what a checkpoint does not keep; `asynchronous` with
                something on disk; or a failed load or step has left tensors on disk that are partly old and partly new.
            RanksDisagreeError: Other ranks do not save.
        """
        self._checkpoints.save(save_dir, tag, client_state, asynchronous=asynchronous)
        return True

    def wait_for_checkpoint(self) -> None:
        """Return when the checkpoint that is being written is complete, at once if there is none.

        All ranks call it at the same point: at the end of training, before the process group is destroyed.

        Raises:
            CheckpointError: It could not be written, and all ranks raise; the checkpoint before stays the latest.
        """
        self._checkpoints.wait()

    def load_checkpoint(
        self, load_dir: str | PathLike[str], tag: str | int | float | None = None, *, load_module_only: bool = False
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint, which another stage, layout or number of ranks may have written.

        Args:
            load_dir: Folder of checkpoints.
            tag: Which one; None: the latest.
            load_module_only: True leaves optimizer, schedule, scale and counts unchanged.

        Returns:
            The checkpoint's folder and the client's state; None and an empty dict if there is no checkpoint yet.

        Raises:
            CheckpointError: There is no such checkpoint, it is damaged, or of another model; all ranks raise, and the
                engine is unchanged.
        """
        found = self._checkpoints.load(load_dir, tag, module_only=load_module_only)
        if found[0] is not None:
            self.zero_grad()
        return found

    def export(
        self, folder: str | PathLike[str], *, shard_bytes: int = SHARD_BYTES, dtype: torch.dtype | None = None
    ) -> None:
        """Write the model as safetensors, and `config.json` of a transformers model. All ranks call it.

        `transformers.AutoModel*.from_pretrained(folder)` loads it. No rank gathers the whole model: the ranks take
        turns to write files. One of several tied weights is written; buffers are those of the rank that writes them.

        Args:
            folder: Folder that does not exist yet, or is empty.
            shard_bytes: Largest size of a file in bytes.
            dtype: Dtype of floating-point weights; None: that of the shards, which are the masters.

        Raises:
            CheckpointError: The folder is not empty, a rank could not write, or a failed load or step has left tensors
                on disk that are partly old and partly new; all ranks raise.
        """
        self._checkpoints.export(Path(folder), shard_bytes=shard_bytes, dtype=dtype)

    def load_pretrained(self, folder: str | PathLike[str]) -> None:
        """Read the safetensors of `save_pretrained` or `export` into the shards. All ranks call it together.

        Each rank reads only its rows. Optimizer, schedule and counts stay as they are.

        Args:
            folder: A folder of `*.safetensors`, with the names of the model's `state_dict`.

        Raises:
            CheckpointError: A weight is missing or has another shape; all ranks raise, and the model is as it was. Or a
                disk failed while reading: a model with parameters on disk cannot run until a load succeeds.
        """
        self._checkpoints.load_pretrained(Path(folder))

    def close(self) -> None:
        """Release the compiled model, gradients, the loader's processes, and optimizer state on disk.

        The partitioned model stays. Its parameters on disk, if any, stay there as long as the model lives.
        A checkpoint that is being written is waited for: then all ranks call it at the same point.

        Raises:
            CheckpointError: That checkpoint could not be written.
        """
        try:
            self._checkpoints.close()
        finally:
            self._strategy.close()
            if self.training_dataloader is not None:
                self.training_dataloader.end_loop()
            hooks_of(self.optimizer).finish()
            if self.progressive_layer_drop is not None:
                self.progressive_layer_drop.let_go()
            self._logger.close()
            self.optimizer.zero_grad()
            hooks_of(self.optimizer).close()

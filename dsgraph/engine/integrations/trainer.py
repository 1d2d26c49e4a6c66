"""`DsgraphTrainer`: transformers' `Trainer` that trains with the engine. It needs transformers and accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from dsgraph.engine.config.auto_values import filled
from dsgraph.engine.engine import Engine
from dsgraph.partitioning.state_dict.full_state_dict import full_tensors
from dsgraph.utils.errors import ConfigError

from .accelerator import DsgraphAccelerator
from .engine_optimizer import EngineScheduler

_Base: Any = object  # a `Trainer`, once the mix-in is mixed in
_TAG = "engine"
_SCHEDULE = "scheduler.pt"


class DsgraphMixin(_Base):
    """A mixin that makes a `Trainer` train with the engine: `class MyTrainer(DsgraphMixin, Trainer)`.

    Its checkpoints contain the model as `from_pretrained` reads it, and the engine's own checkpoint, from which
    training continues with any number of ranks.
    """

    def __init__(
        self, *args: Any, dsgraph_config: str | PathLike[str] | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Create a trainer.

        Args:
            *args: Arguments of `Trainer`.
            dsgraph_config: The engine's configuration; `"auto"` values are those of `TrainingArguments`. None:
                everything follows from the arguments.
            **kwargs: Arguments of `Trainer`.
        """
        self._given_config = {} if dsgraph_config is None else dsgraph_config
        self._accelerator_args: dict[str, Any] = {}
        self._names_optimizer = False
        super().__init__(*args, **kwargs)
        for name in ("auto_find_batch_size", "torch_compile"):
            if getattr(self.args, name):
                raise ConfigError(f"DsgraphTrainer: {name} is not supported: leave it out of TrainingArguments")

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args = super()._build_accelerator_args(**kwargs)
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator like `Trainer` does, but a `DsgraphAccelerator`."""
        super().create_accelerator_and_postprocess()
        self.accelerator = DsgraphAccelerator(**self._accelerator_args)

    @property
    def engine(self) -> Engine | None:
        """The engine; None before training."""
        return self.accelerator.engine

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if isinstance(self.model_wrapped, Engine):
            self.accelerator.prepare(self.model_wrapped)  # training goes on: `free_memory` has released the engine
        else:
            model = self.accelerator.unwrap_model(self.model)
            sizes = getattr(model, "config", None)
            size = getattr(sizes, "hidden_size", None)
            config = filled(self._given_config, self.args, hidden_size=size, steps=max_steps)
            del config["gradient_accumulation_steps"]  # the accelerator has 1: the `Trainer` divides the loss
            self.accelerator.dsgraph_config = config | {"gradient_clipping": 0}  # the `Trainer` clips
            self._names_optimizer = config.get("optimizer") is not None
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Return the `Trainer`'s own optimizer, unless the configuration names one."""
        if self._names_optimizer:
            return self.optimizer
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the `Trainer`'s own scheduler, unless the configuration names one, which the engine steps."""
        if self.engine is not None and self.engine.lr_scheduler is not None:
            schedule: Any = EngineScheduler(self.engine.lr_scheduler, [])
            self.lr_scheduler = schedule
            return schedule
        return super().create_scheduler(num_training_steps, optimizer)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if self.engine is not None and model in (self.model, self.engine):
            return self.engine
        return super()._wrap_model(model, training=training, dataloader=dataloader)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model from the main process. All ranks call it: their shards are gathered."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call=_internal_call)
            return
        state_dict = full_tensors(self.engine.module.state_dict(keep_vars=True), keep=self.args.should_save)
        if self.args.should_save:
            self._save(output_dir, state_dict=state_dict)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        self.engine.save_checkpoint(output_dir, tag=_TAG)
        if self.args.should_save and not isinstance(self.lr_scheduler, EngineScheduler):
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.engine is not None
        self.engine.load_checkpoint(checkpoint, tag=_TAG)
        if not isinstance(self.lr_scheduler, EngineScheduler):
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULE, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing if there is an engine checkpoint: the engine reads it."""


class DsgraphTrainer(DsgraphMixin, Trainer):
    """A `Trainer` of transformers that trains with the engine, see `DsgraphMixin`.

    trainer = DsgraphTrainer(model, TrainingArguments(...), train_dataset=data, dsgraph_config="ds.json")
    """

"""`DsgraphAccelerator`: an `Accelerator` that trains with the engine. It needs accelerate, which is optional."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from dsgraph.engine.config.auto_values import with_values
from dsgraph.engine.config.read_config import load_config
from dsgraph.engine.engine import Engine
from dsgraph.engine.initialize import initialize
from dsgraph.engine.makers import resolve_makers
from dsgraph.engine.optimizers.binding import Binding, rebound
from dsgraph.engine.optimizers.offloading import offloaded
from dsgraph.engine.training_state import TrainingState
from dsgraph.optim.full_matrix import whole_where_needed
from dsgraph.optim.hooks import hooks_of
from dsgraph.partitioning.refusals import early_optimizers
from dsgraph.partitioning.state import partition_states
from dsgraph.partitioning.state_dict.full_state_dict import full_tensors
from dsgraph.utils.errors import ConfigError, EngineError

from .engine_optimizer import EngineOptimizer, EngineScheduler, NoOptimizer

_TAG = "engine"  # the folder of the engine's checkpoint inside that of `save_state`


class DsgraphAccelerator(Accelerator):
    """An `Accelerator` whose `prepare` makes an engine of the model and the optimizer.

        accelerator = DsgraphAccelerator(dsgraph_config="ds.json", gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    Attributes:
        dsgraph_config: The configuration, as for `dsgraph.initialize`.
        engine: The engine; None before `prepare`, and after `free_memory`.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(
        self, *args: Any, dsgraph_config: str | PathLike[str] | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Create an accelerator.

        Args:
            *args: Arguments of `Accelerator`.
            dsgraph_config: The engine's configuration. "auto" stands for the numbers of what is prepared with the
                model. Without `gradient_clipping` only the loop clips. None: defaults.
            **kwargs: Arguments of `Accelerator`.

        Raises:
            ConfigError: An argument, or accelerate's own configuration, asks for what the engine does in another way.
        """
        super().__init__(*args, **kwargs)
        backend = self.state.dynamo_plugin.backend
        if backend != DynamoBackend.NO:
            raise ConfigError(
                f"DsgraphAccelerator: dynamo_backend is {backend.value}, but the engine compiles the model, and equal "
                "blocks of it once, as the section dsgraph says: leave it out of Accelerator and `accelerate config`"
            )
        self.dsgraph_config = dsgraph_config
        self.engine: Engine | None = None
        self._reduces = self._was_reduced = True
        # The engine casts, and scales the loss.
        self.native_amp, self.scaler = False, None
        self.register_save_state_pre_hook(self._save_engine)
        self.register_load_state_pre_hook(self._load_engine)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare like `Accelerator.prepare`: a model becomes an engine, an optimizer becomes the engine's.

        An optimizer of the model's parameters may also be prepared later, and be made before or after its model is.

        Raises:
            EngineError: There is a second model, or a second optimizer.
            ConfigError: See `initialize`.
        """
        self.engine = next((value for value in args if isinstance(value, Engine)), self.engine)
        models = [value for value in args if isinstance(value, nn.Module) and not isinstance(value, Engine)]
        optimizers = [value for value in args if isinstance(value, (Optimizer, DummyOptim)) and not _is_prepared(value)]
        schedules = [value for value in args if isinstance(value, (LRScheduler, DummyScheduler))]
        if len(models) > 1 or len(optimizers) > 1 or (models and self.engine is not None):
            raise EngineError(
                "prepare: an accelerator has one engine for one model and one optimizer, which may have several groups "
                "of parameters: make another accelerator for another model"
            )
        if not models and any(isinstance(value, (DummyOptim, DummyScheduler)) for value in args):
            raise EngineError("prepare: DummyOptim and DummyScheduler fill the configuration: pass them with the model")
        if models:
            optimizer, schedule = (optimizers or [None])[0], (schedules or [None])[0]
            sizes = [value.batch_size for value in args if isinstance(value, DataLoader) and value.batch_size]
            config = self._filled(optimizer, schedule, min(sizes, default=None))
            engine = self.engine = self._engine_of(models[0], optimizer, schedule, config)
            ours: dict[int, Any] = {id(models[0]): engine}
            if not isinstance(engine.optimizer, NoOptimizer):
                ours[id(optimizer)] = EngineOptimizer(engine)
            if isinstance(schedule, DummyScheduler):
                ours[id(schedule)] = EngineScheduler(engine.lr_scheduler, [])
            args = tuple(ours.get(id(value), value) for value in args)
        return super().prepare(*args, device_placement=device_placement)

    def _engine_of(self, model: nn.Module, optimizer: Any, schedule: Any, config: dict[str, Any]) -> Engine:
        """Return the engine of a model. Existing optimizers of its parameters get its shards."""
        is_dummy = isinstance(optimizer, DummyOptim)
        given = NoOptimizer if optimizer is None and not config.get("optimizer") else None if is_dummy else optimizer
        # A schedule that the loop steps replaces that of the configuration.
        schedule = getattr(schedule, "lr_scheduler_callable", (lambda _: None) if schedule else None)
        with contextlib.ExitStack() as stack:
            for early, _ in early_optimizers(param for param in model.parameters() if not isinstance(param, DTensor)):
                stack.enter_context(rebound(None if early is optimizer else early, model))
            params = optimizer.params if is_dummy else None
            engine, *_ = initialize(None, model, given, params, lr_scheduler=schedule, config=config)
        engine.training_state.boundary = lambda: self._reduces
        vars(engine)["_is_accelerate_prepared"] = True  # so that `super` takes it as it is
        return engine

    def _filled(self, optim: Any, schedule: Any, batch_size: int | None) -> dict[str, Any]:
        """Return the configuration, in which "auto" has the numbers of what is prepared with the model.

        Raises:
            ConfigError: It contradicts the accelerator, or lacks a section.
        """
        config = {"gradient_clipping": 0, **load_config(self.dsgraph_config or {})}
        steps, precision = self.gradient_accumulation_steps, self.mixed_precision
        if not isinstance(config.get("train_batch_size"), int):
            config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", **config}
        values: dict[str, Any] = {"train_micro_batch_size_per_gpu": batch_size, "gradient_accumulation_steps": steps}
        values[precision] = {"enabled": True}
        if isinstance(optim, DummyOptim):
            values["optimizer"] = {"params": {"lr": optim.lr, "weight_decay": optim.weight_decay, **optim.kwargs}}
        if isinstance(schedule, DummyScheduler):
            total, of = schedule.total_num_steps, schedule.optimizer
            own = {"warmup_min_lr": 0, "warmup_num_steps": max(1, schedule.warmup_num_steps)}
            own["warmup_max_lr"] = of.lr if isinstance(of, DummyOptim) else of.defaults.get("lr")
            own["total_num_steps"] = total and math.ceil(total / (1 if self.split_batches else self.num_processes))
            values["scheduler"] = {"params": {**own, **schedule.kwargs}}
            if not config.get("scheduler") and schedule.lr_scheduler_callable is None:
                raise ConfigError("prepare: DummyScheduler needs the section scheduler, or lr_scheduler_callable")
        config = with_values(config, values)
        is_low = bool((config.get(precision) or {}).get("enabled"))
        given = {"gradient_accumulation_steps": config.get("gradient_accumulation_steps", steps), precision: is_low}
        for key, wanted in {"gradient_accumulation_steps": steps, precision: precision != "no"}.items():
            if given[key] != wanted:
                raise ConfigError(
                    f"prepare: {key} is {given[key]} in dsgraph_config, and {wanted} by the accelerator's arguments or "
                    "`accelerate config`: write the same in both"
                )
        return config

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Give the optimizer to the engine, whose model was prepared before.

        Raises:
            EngineError: There is no model, or the engine has an optimizer.
            ConfigError: It has parameters of something else.
        """
        if _is_prepared(optimizer):
            return super().prepare_optimizer(optimizer)
        engine = self._prepared("prepare(optimizer)")
        if not isinstance(engine.optimizer, NoOptimizer):
            raise EngineError("prepare: the engine has an optimizer already, of its configuration or of the loop")
        Binding(engine.module, [{"params": group["params"]} for group in optimizer.param_groups])
        inner = engine.training_state.optimizer = offloaded(whole_where_needed(optimizer), engine.config)
        engine.lr_scheduler = resolve_makers(optimizer, None, engine.config, engine.module).schedule(inner)
        return super().prepare_optimizer(EngineOptimizer(engine))

    def free_memory(self, *objects: Any) -> Any:
        """Release what was prepared, like `Accelerator.free_memory`; an engine among `objects` is closed."""
        for engine in (value for value in objects if isinstance(value, Engine)):
            engine.close()
        self.engine = None
        return super().free_memory(*objects)

    def _prepared(self, call: str) -> Engine:
        if self.engine is None:
            raise EngineError(f"{call}: there is no model: call prepare(model) first, or pass both in one call")
        return self.engine

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add gradients. They are reduced, except inside `no_sync`."""
        self._prepared("backward").backward(loss / self.gradient_accumulation_steps, scale_wrt_gas=False, **kwargs)
        self._was_reduced = self._reduces

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Add up gradients inside the block; stages 0 and 1 reduce them in the first backward after it."""
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the loss scale of fp16, once a step. All ranks call it together."""
        state = self._clippable()
        if hooks_of(state.optimizer).is_compressing:
            raise EngineError("unscale_gradients: a 1-bit optimizer has no gradients after its warm-up: leave it out")
        if state.loss_scale.scale != 1:
            state.unscale()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradients like `Accelerator.clip_grad_norm_`, and return their global norm before.

        All ranks call it together. NaN after the warm-up of a 1-bit optimizer, when nothing is clipped.

        Raises:
            EngineError: The gradients are not reduced, or a 1-bit optimizer after warm-up is asked for another norm.
        """
        state, params = self._clippable(), list(parameters)
        reduced = {id(entry.param) for entry in state.partition.parameters if entry.param.grad is not None}
        if reduced <= {*map(id, params)} and norm_type == 2 and max_norm > 0:
            return torch.tensor(state.unscale(max_norm=max_norm), device=self.device)
        found = super().clip_grad_norm_(params, max_norm, norm_type)
        return found.full_tensor() if isinstance(found, DTensor) else found

    def _clippable(self) -> TrainingState:
        if not self._was_reduced:
            raise EngineError("clipping: gradients are not reduced: write `if accelerator.sync_gradients:` before it")
        return self._prepared("clipping").training_state

    def unwrap_model(self, model: nn.Module, **kwargs: Any) -> Any:
        """Return the model inside an engine."""
        return super().unwrap_model(model.module if isinstance(model, Engine) else model, **kwargs)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save like `Accelerator.save_state`, with model and optimizer as an engine checkpoint in the folder `engine`.

        All ranks call it, after `step` or `zero_grad`. Any number of ranks loads the checkpoint, at any stage.

        Raises:
            CheckpointError: See `Engine.save_checkpoint`.
        """
        with self._engine_apart():
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Load what `save_state` has written, like `Accelerator.load_state`. All ranks call it.

        Raises:
            CheckpointError: The folder contains no engine checkpoint; see also `Engine.load_checkpoint`.
        """
        with self._engine_apart():
            return super().load_state(input_dir, load_kwargs, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return full parameters and buffers, on the CPU of rank 0; other ranks get names and shapes without memory.

        All ranks call it.
        """
        inner = model.module if isinstance(model, Engine) else model
        if not partition_states(inner):
            return super().get_state_dict(model, unwrap)
        values, nan = inner.state_dict(keep_vars=True), torch.tensor(math.nan)
        found = full_tensors(values, keep=self.is_main_process)
        return found or {name: nan.to(value.dtype, copy=True).expand(value.shape) for name, value in values.items()}

    @contextlib.contextmanager
    def _engine_apart(self) -> Iterator[None]:
        """Hide engine and optimizer from accelerate, which would save one rank's shards as if they were complete."""
        models, optimizers = self._models, self._optimizers
        self._models = [model for model in models if not isinstance(model, Engine)]
        self._optimizers = [optimizer for optimizer in optimizers if not isinstance(optimizer, EngineOptimizer)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def _save_engine(self, models: object, weights: object, output_dir: str) -> None:
        if self.engine is not None:
            self.engine.save_checkpoint(output_dir, _TAG)

    def _load_engine(self, models: object, input_dir: str) -> None:
        if self.engine is not None:
            self.engine.load_checkpoint(input_dir, _TAG, load_module_only=not self.engine.optimizer.param_groups)


def _is_prepared(value: object) -> bool:
    return bool(getattr(value, "_is_accelerate_prepared", False))

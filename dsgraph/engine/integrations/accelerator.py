"""`DsgraphAccelerator`: an `Accelerator` that trains with the engine. It needs accelerate, which is optional."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

from dsgraph.engine.engine import Engine
from dsgraph.engine.initialize import initialize
from dsgraph.partitioning.state import partition_states
from dsgraph.utils.errors import EngineError

_TAG = "engine"
"""Folder of the engine's checkpoint inside the folder of `save_state`."""


class EngineOptimizer(AcceleratedOptimizer):
    """The optimizer of an engine, which has already stepped in `Accelerator.backward`."""

    def __init__(self, engine: Engine) -> None:
        """Create the view of the optimizer of `engine`."""
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self._engine = engine
        self._is_accelerate_prepared = True

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Do nothing: the engine has stepped."""
        if closure is not None:
            raise EngineError(
                "step: Accelerator.backward has stepped the engine already: call step() without a closure"
            )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine drops gradients after its step."""

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped, because its gradients were not finite."""
        return self._engine.was_step_skipped()


class DsgraphAccelerator(Accelerator):
    """An `Accelerator` whose `prepare` makes an engine of the model and the optimizer.

        accelerator = DsgraphAccelerator(dsgraph_config="ds.json", gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()

    `backward` steps as well, at the last micro-batch of a step, as with DeepSpeed.

    Attributes:
        dsgraph_config: The configuration, as for `dsgraph.initialize`.
        engine: The engine; None before `prepare`.
    """

    def __init__(
        self, *args: Any, dsgraph_config: str | PathLike[str] | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Create an accelerator.

        Args:
            *args: Arguments of `Accelerator`.
            dsgraph_config: The engine's configuration; it defines the precision.
            **kwargs: Arguments of `Accelerator`.
        """
        super().__init__(*args, **kwargs)
        self.dsgraph_config = dsgraph_config
        self.engine: Engine | None = None
        # The engine casts, and scales the loss.
        self.native_amp, self.scaler = False, None

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare like `Accelerator.prepare`: a model becomes an engine, an optimizer becomes the engine's.

        Raises:
            EngineError: There is a second model.
            ConfigError: See `initialize`.
        """
        models = [value for value in args if isinstance(value, nn.Module) and not isinstance(value, Engine)]
        if not models:
            return super().prepare(*args, device_placement=device_placement)
        if len(models) > 1 or self.engine is not None:
            raise EngineError(
                "prepare: an accelerator has one engine for one model: make another accelerator for another"
            )
        optimizers = [value for value in args if isinstance(value, Optimizer)]
        if len(optimizers) > 1:
            raise EngineError("prepare: it got several optimizers, but an engine has one: pass one")
        self.engine, *_ = initialize(
            model=models[0], optimizer=optimizers[0] if optimizers else None, config=self.dsgraph_config
        )
        self.engine.boundary = lambda: bool(self.sync_gradients)
        vars(self.engine)["_is_accelerate_prepared"] = True  # so that `super` takes it as it is
        self.register_save_state_pre_hook(self._save_engine)
        self.register_load_state_pre_hook(self._load_engine)
        ours = [self._of_engine(value, EngineOptimizer(self.engine)) for value in args]
        return super().prepare(*ours)

    def _of_engine(self, value: Any, optimizer: EngineOptimizer) -> Any:
        """Return the engine for its model, and the engine's optimizer for its optimizer or for None."""
        if isinstance(value, nn.Module):
            return self.engine
        return optimizer if value is None or isinstance(value, Optimizer) else value

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add gradients, and step at the last micro-batch of a step."""
        if self.engine is None:
            raise EngineError("backward: there is no model: call prepare(model) first")
        self.engine.backward(loss / self.gradient_accumulation_steps, scale_wrt_gas=False, **kwargs)
        self.engine.step()

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Do nothing: the engine knows which micro-batch is the last."""
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Return the global gradient norm of the step; the engine has clipped to `gradient_clipping`.

        Raises:
            EngineError: Another bound, or another norm than the 2-norm.
        """
        assert self.engine is not None
        bound = self.engine.config.gradient_clipping or math.inf
        if norm_type != 2 or max_norm not in (bound, math.inf):
            raise EngineError(
                f"clip_grad_norm_: the engine clips the 2-norm to gradient_clipping = {bound:g} before its step, and "
                f"was asked for {max_norm:g} (norm_type={norm_type}): write the same number"
            )
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else torch.tensor(norm)

    def unwrap_model(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Return the model inside an engine."""
        unwrapped: nn.Module = super().unwrap_model(model.module if isinstance(model, Engine) else model, **kwargs)
        return unwrapped

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save like `Accelerator.save_state`, with model and optimizer as an engine checkpoint in the folder `engine`.

        All ranks call it. The checkpoint can be loaded on any number of ranks and at any stage.
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
        """Return the full parameters and buffers of an engine's model, on the CPU of rank 0; empty on other ranks.

        All ranks call it.
        """
        inner = model.module if isinstance(model, Engine) else model
        if not partition_states(inner):
            return super().get_state_dict(model, unwrap)
        return get_model_state_dict(inner, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    @contextlib.contextmanager
    def _engine_apart(self) -> Iterator[None]:
        """Hide engine and optimizer from accelerate, which would save one rank's shards as if they were complete."""
        own: dict[str, Any] = self.__dict__
        kept = {name: own[name] for name in ("_models", "_optimizers")}
        own |= {
            name: [item for item in items if not isinstance(item, (Engine, EngineOptimizer))]
            for name, items in kept.items()
        }
        try:
            yield
        finally:
            own |= kept

    def _save_engine(self, models: object, weights: object, output_dir: str) -> None:
        assert self.engine is not None
        self.engine.save_checkpoint(output_dir, _TAG)

    def _load_engine(self, models: object, input_dir: str) -> None:
        assert self.engine is not None
        self.engine.load_checkpoint(input_dir, _TAG)

"""Attributes of the model on an engine, so that transformers accepts the engine as a model, as in `pipeline`."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from dsgraph.compat.modules import device_and_dtype
from dsgraph.utils.errors import InferenceError

_Self = TypeVar("_Self", bound="ModelAttributes")
# Attributes that are read from the model unchanged.
_READ = frozenset(
    {
        *("parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "num_parameters"),
        *("get_input_embeddings", "get_output_embeddings", "get_memory_footprint", "save_pretrained", "push_to_hub"),
        *("can_generate", "name_or_path", "main_input_name", "base_model_prefix", "hf_device_map"),
        *("input_modalities", "output_modalities", "_is_stateful", "framework", "compute_transition_scores"),
    }
)


class ModelAttributes:
    """The attributes of a transformers model, for code that receives an engine instead.

    `config`, `generation_config`, `device`, `dtype`, `parameters()`, `state_dict()` and others are the model's.
    `eval()` and `to(...)` return the engine if they would change nothing, and are refused otherwise.
    """

    module: Any
    training = False

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.module.config

    @property
    def generation_config(self) -> Any:
        """The model's defaults of `generate`; changes take effect."""
        return self.module.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.module.generation_config = value

    @property
    def device(self) -> torch.device:
        """The model's device."""
        found: torch.device = self.module.device
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's floating-point weights."""
        found: torch.dtype = self.module.dtype
        return found

    def eval(self: _Self) -> _Self:
        """Return the engine, which is in evaluation mode."""
        return self

    def train(self: _Self, mode: bool = True) -> _Self:
        """Return the engine for `mode=False`.

        Raises:
            InferenceError: `mode` is True.
        """
        if mode:
            raise InferenceError(
                "engine.train(): an engine of init_inference does not train: train its model with dsgraph.compile or "
                "dsgraph.initialize, then make the engine"
            )
        return self

    def to(self: _Self, *args: Any, **kwargs: Any) -> _Self:
        """Return the engine, if the model is on that device and has that dtype.

        Raises:
            InferenceError: The call would move or convert the weights for which graphs are compiled.
        """
        device, dtype = device_and_dtype(*args, **kwargs)
        own = self.device
        is_there = device is None or (device.type == own.type and device.index in (None, own.index))
        if not is_there or (dtype is not None and dtype != self.dtype):
            wanted = ", ".join(str(each) for each in (device, dtype) if each is not None)
            raise InferenceError(
                f"engine.to({wanted}): the engine's graphs are compiled for {own}, {self.dtype}: move or convert the "
                "model before init_inference, or use its dtype="
            )
        return self

    def cpu(self: _Self) -> _Self:
        """Return `to("cpu")`."""
        return self.to("cpu")

    def cuda(self: _Self, device: int | torch.device | None = None) -> _Self:
        """Return `to("cuda")`."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def float(self: _Self) -> _Self:
        """Return `to(torch.float32)`."""
        return self.to(torch.float32)

    def half(self: _Self) -> _Self:
        """Return `to(torch.float16)`."""
        return self.to(torch.float16)

    def bfloat16(self: _Self) -> _Self:
        """Return `to(torch.bfloat16)`."""
        return self.to(torch.bfloat16)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, for names that are read from it unchanged.

        Raises:
            AttributeError: The engine has no such attribute, and it is not one that is read from the model.
        """
        if name in _READ and "module" in vars(self):
            return getattr(self.module, name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}: engine.module is the model")

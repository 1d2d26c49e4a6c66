"""Megatron-style objects that define which ranks share a model that its own code has made tensor-parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh

from dsgraph.utils.errors import ConfigError

_GROUPS = ("get_tensor_model_parallel_group", "get_model_parallel_group")
_STAGES = ("get_pipe_parallel_world_size", "get_pipeline_model_parallel_world_size")
_SLICED = ("tensor_model_parallel", "model_parallel")


@dataclass(frozen=True)
class ModelParallel:
    """The ranks that share a model which its own code has made tensor-parallel.

    Attributes:
        group: Their process group.
        sliced: Names of the tensor-parallel parameters: the model's code has marked these with `tensor_model_parallel`
            or `model_parallel`, as Megatron's does. All others are replicated.
    """

    group: dist.ProcessGroup
    sliced: frozenset[str]

    @classmethod
    def of(cls, mpu: Any, model: nn.Module) -> ModelParallel | None:
        """Return the ranks that an object defines; None if no ranks share a model.

        Raises:
            ConfigError: It lacks a getter, or there are pipeline stages.
        """
        stages = next((getattr(mpu, name)() for name in _STAGES if hasattr(mpu, name)), 1)
        if stages > 1:
            raise ConfigError(f"initialize: mpu has {stages} pipeline stages: use the section parallel for stages")
        group = _called(mpu, _GROUPS)
        if dist.get_world_size(group) == 1:
            return None
        named = model.named_parameters()
        return cls(
            group, frozenset(name for name, param in named if any(getattr(param, mark, False) for mark in _SLICED))
        )


def _is_sliced(param: nn.Parameter) -> bool:
    return any(getattr(param, mark, False) for mark in _SLICED)


def data_parallel_mesh(mpu: Any, device_type: str) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same slices, over which ZeRO shards.

    Raises:
        ConfigError: The object lacks a getter.
    """
    return DeviceMesh.from_group(_called(mpu, ("get_data_parallel_group",)), device_type, mesh_dim_names=("dp",))


def _called(mpu: Any, getters: tuple[str, ...]) -> Any:
    for name in getters:
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    raise ConfigError(f"initialize: mpu is a {type(mpu).__name__} without {getters[0]}(), which tells the ranks")

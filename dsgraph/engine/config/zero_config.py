"""The section `zero_optimization`, with where the states of the optimizer and the parameters are stored."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import AliasChoices

from .key import MODEL_DEVICE, NO_EFFECT, FromHiddenSize, Needs, key
from .section import PathText, Section

_BUFFERS, _BUFFER_ELEMENTS = 5, 10**8  # DeepSpeed's defaults of `offload_param`
_ELEMENT = 4  # bytes
_TIERS = {"nvme": "disk", "cpu": "host"}

_IS_SET = Needs(".device", ("cpu", "nvme"), "nothing is offloaded")
_IS_READ = Needs(".device", ("nvme",), "nothing is read", note=NO_EFFECT)
_DISK = (
    Needs(".nvme_path", (), "it names the folder on that disk", only="nvme"),
    Needs(MODEL_DEVICE, ("cpu",), "offloading from a GPU to a disk is not supported yet", only="nvme"),
)
_NOT_FROM_GPU = Needs(MODEL_DEVICE, ("cpu",), "parameters of a model on a GPU stay there", only="cpu")
_STAGE_3 = Needs("zero_optimization.stage", (3,), "other stages keep parameters where they are used")


def _partition_offload(_: Any, config: Any) -> dict[str, Any] | None:
    """Return the argument `offload` of `partition`."""
    zero = config.zero_optimization
    wanted: dict[str, OffloadOptimizerConfig | OffloadParamConfig] = {
        "optimizer": zero.offload_optimizer,
        "parameters": zero.offload_param,
    }
    tiers = {what: _TIERS[section.device] for what, section in wanted.items() if section.device in _TIERS}
    if tiers.get("parameters") == "host":  # the model is on the CPU: its parameters are there already
        del tiers["parameters"]
    if not tiers:
        return None
    folder = wanted["parameters" if "parameters" in tiers else "optimizer"].nvme_path
    ratio = {what: wanted[what].ratio for what in tiers}
    return {**tiers, "ratio": ratio, **({} if folder is None else {"folder": folder})}


def _bytes_of(elements: int, config: Any) -> int:
    """Return the bytes of so many elements in the dtype of the forward: backend options count bytes."""
    return elements * (config.compute_dtype or torch.float32).itemsize


def _read_ahead(_: int, config: Any) -> int | None:
    """Return the option `read_ahead_bytes`."""
    ahead: int | None = config.zero_optimization.offload_param.read_ahead
    return ahead


def _nvme_path() -> Any:
    return key(
        None,
        "folder on that disk; created if it does not exist",
        needs=(Needs(".device", ("nvme",), "nothing is stored on disk"),),
        stages=True,
    )


def _ratio() -> Any:
    return key(
        1.0,
        "share that is offloaded; the part of the last parameters stays in memory",
        gt=0,
        le=1,
        needs=(_IS_SET,),
        stages=True,
    )


class OffloadOptimizerConfig(Section):
    """Storage of the optimizer state."""

    device: Literal["none", "cpu", "nvme"] = key(
        "none",
        '"nvme": on disk (for a model on the CPU); "cpu": in host memory, with float32 masters of 16-bit parameters '
        "(a model on the CPU has its state there already)",
        argument="offload",
        value=_partition_offload,
        needs=_DISK,
        stages=True,
    )
    nvme_path: PathText | None = _nvme_path()
    ratio: float = _ratio()
    pin_memory: bool | None = key(
        None,
        'use pinned host memory, for "cpu" and a model on CUDA; `false` disables it',
        needs=(_IS_SET, Needs(MODEL_DEVICE, (), "nothing is copied to a device", note=NO_EFFECT, other_than="cpu")),
        stages=True,
    )


class OffloadParamConfig(Section):
    """Storage of parameters and their gradients."""

    device: Literal["none", "cpu", "nvme"] = key(
        "none",
        '"nvme": on disk; "cpu": in host memory (a model on the CPU has its parameters there already)',
        argument="offload",
        value=_partition_offload,
        needs=(*_DISK, _NOT_FROM_GPU, _STAGE_3),
        stages=True,
    )
    nvme_path: PathText | None = _nvme_path()
    ratio: float = _ratio()
    buffer_count: int | None = key(
        None,
        'with "nvme": number of buffers for prefetched parameters; see `buffer_size`',
        ge=1,
        option="read_ahead_bytes",
        value=_read_ahead,
        needs=(_IS_READ,),
    )
    buffer_size: int | None = key(
        None,
        "elements of 4 bytes per buffer. At most `buffer_count` x `buffer_size` elements are prefetched, but at least "
        "one parameter. Default: 64 MiB if neither is set, else DeepSpeed's 5 and 100,000,000",
        ge=1,
        option="read_ahead_bytes",
        value=_read_ahead,
        needs=(_IS_READ,),
    )

    @property
    def read_ahead(self) -> int | None:
        """Bytes of parameters that may be in transfer, or read and not used; None: the default of the passes."""
        if self.device != "nvme" or (self.buffer_count is None and self.buffer_size is None):
            return None
        return (self.buffer_count or _BUFFERS) * (self.buffer_size or _BUFFER_ELEMENTS) * _ELEMENT


class ZeroConfig(Section):
    """ZeRO: the states that are sharded over ranks, and those that are offloaded."""

    stage: Literal[0, 1, 2, 3] = key(0, "ZeRO stage, see `dsgraph.partition`", argument="stage", stages=True)
    param_persistence_threshold: int | None = key(
        None,
        "parameters with fewer elements stay replicated; default: 16,384",
        ge=0,
        validation_alias=AliasChoices("stage3_param_persistence_threshold", "param_persistence_threshold"),
        argument="keep_whole_below",
        auto=FromHiddenSize("10 x hidden size", lambda size: 10 * size),
        stages=True,
    )
    reduce_bucket_size: int | None = key(
        None,
        "maximum number of gradient elements in one collective",
        ge=1,
        option="reduce_bucket_bytes",
        value=_bytes_of,
        auto=FromHiddenSize("hidden size squared", lambda size: size * size),
    )
    allgather_bucket_size: int | None = key(
        None,
        "maximum number of parameter elements in one collective",
        ge=1,
        option="gather_bucket_bytes",
        value=_bytes_of,
    )
    overlap_comm: bool | None = key(
        None, "`false` disables the passes that overlap collectives with computation", option="overlap_comm"
    )
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()

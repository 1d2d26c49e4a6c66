"""The sections `offload_optimizer` and `offload_param`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .section import PathText, Section

_BUFFERS, _BUFFER_ELEMENTS = 5, 10**8  # DeepSpeed's defaults of `offload_param`
_ELEMENT = 4  # bytes


class OffloadOptimizerConfig(Section):
    """Where the optimizer's state lies."""

    device: Literal["none", "cpu", "nvme"] = Field(
        default="none",
        description='"nvme": on disk, with a model on the CPU; "cpu": in the host\'s memory, where 16-bit parameters '
        "have masters of float32, and the state lies anyway if the model is trained on the CPU",
    )
    nvme_path: PathText | None = Field(
        default=None, description="the folder on that disk; it is made if it is not there"
    )
    pin_memory: bool | None = Field(
        default=None,
        description='with "cpu" and a model on CUDA: whether copies are pinned; they are unless `false`',
    )
    ratio: float = Field(
        default=1.0, gt=0, le=1, description="the share of the state that lies there; that of the last parameters stays"
    )


class OffloadParamConfig(Section):
    """Where parameters and their gradients lie."""

    device: Literal["none", "cpu", "nvme"] = Field(
        default="none", description='"nvme": on disk; "cpu" is where they lie anyway if the model is trained on the CPU'
    )
    nvme_path: PathText | None = Field(
        default=None, description="the folder on that disk; it is made if it is not there"
    )
    ratio: float = Field(
        default=1.0, gt=0, le=1, description="the share of their bytes that lies there; the last parameters stay"
    )
    buffer_count: int | None = Field(
        default=None, ge=1, description='with "nvme": parameters are read ahead into so many buffers; see `buffer_size`'
    )
    buffer_size: int | None = Field(
        default=None,
        ge=1,
        description="of so many elements of 4 bytes: their product is what may be read ahead, or the next parameter. "
        "Without either 64 MiB; with one alone the other is DeepSpeed's, 5 and 100,000,000",
    )

    @property
    def read_ahead(self) -> int | None:
        """Bytes of parameters that may be on their way, or read and not used; None: as the passes have it."""
        if self.buffer_count is None and self.buffer_size is None:
            return None
        return (self.buffer_count or _BUFFERS) * (self.buffer_size or _BUFFER_ELEMENTS) * _ELEMENT

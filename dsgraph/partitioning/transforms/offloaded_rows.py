"""A parameter whose rows and gradient are stored on disk."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from dsgraph.offload.stored_rows import StoredRows

from .parameter_transform import ParameterTransform


class OffloadedRows(ParameterTransform):
    """Rows of a parameter in a file. Passes stream them in compiled graphs, eager code reads mapped memory.

    Attributes:
        stored: Where the rows are stored.
    """

    tier: ClassVar[str] = "disk"

    def __init__(self, stored: StoredRows) -> None:
        self.stored = stored

    @override
    def store(self, rows: Tensor) -> Tensor:
        return self.stored.fill(rows.contiguous())

    @override
    def attach(self, param: DTensor) -> None:
        self.stored.belongs_to(param)

    @override
    def before_eager_gather(self) -> None:
        self.stored.note_eager_read()

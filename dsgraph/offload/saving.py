"""Checkpoints of what lies on disk, without bringing it into memory."""

from __future__ import annotations

import io
import threading

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.optim import Optimizer
from typing_extensions import override

from dsgraph.tiers.stored_rows import stored_rows

from .stored_state import StoredState


class SavePlannerFromDisk(DefaultSavePlanner):
    """Drops the pages of each tensor on disk when the next one is written: `dcp.save(..., planner=...)`.

    So each thread that writes has one tensor in memory. Without it the kernel drops pages when it needs memory.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """For a state dict with the state of an optimizer, and parameters."""
        super().__init__()
        self._state = optimizer.state
        self._written = threading.local()

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        self._drop(getattr(self._written, "last", None))
        self._written.last = super().resolve_data(write_item)
        return self._written.last

    def _drop(self, written: Tensor | io.BytesIO | None) -> None:
        if not isinstance(written, Tensor):
            return
        rows = stored_rows(written)
        if rows is not None:
            rows.drop_pages()
        elif isinstance(self._state, StoredState):
            self._state.drop_pages(written)

"""A readable copy of every graph, before and after every pass."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch.distributed as dist
from torch.fx import GraphModule

from dsgraph.passes import Phase

from .errors import StrictError


class GraphDump:
    """Writes graphs as Python text: `FOLDER/rank0/compile1/joint-2-insert_zero_collectives.py`.

    A folder that cannot be written warns once, and compiling goes on; with `strict` it raises StrictError.
    """

    def __init__(self, folder: Path, *, compile_number: int, strict: bool = False) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._folder = folder / f"rank{rank}" / f"compile{compile_number}"
        self._strict = strict
        self._has_failed = False

    def write(self, gm: GraphModule, *, phase: Phase, step: str) -> None:
        """Writes one graph; `step` is "0-before" or the pass's number and name."""
        if self._has_failed:
            return
        text = gm.print_readable(print_output=False, include_stride=True, include_device=True)
        path = self._folder / f"{phase.value}-{step}.py"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}.tmp")
            unfinished.write_text(text)
            unfinished.replace(path)  # a reader sees the whole file or none
        except OSError as error:
            self._has_failed = True
            message = f"dsgraph cannot dump graphs to {self._folder} ({error})"
            if self._strict:
                raise StrictError(message) from error
            warnings.warn(f"{message}; going on without", stacklevel=2)

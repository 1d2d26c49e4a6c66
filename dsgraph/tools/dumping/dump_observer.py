"""Dumps what a backend compiles into the folders that the options name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.fx import GraphModule

from dsgraph.compiler.frames import Capture
from dsgraph.compiler.options import BackendOptions
from dsgraph.compiler.request import CompileRequest, CompileWatch
from dsgraph.passes import PassContext, PassRecord

from .writer import DumpFolder, GraphDump


class DumpObserver:
    """Keeps the folders that receive dumps."""

    def __init__(self) -> None:
        self._folders: dict[Path, DumpFolder] = {}

    def captured(self, capture: Capture, options: BackendOptions) -> None:
        """Do nothing: there is no graph to dump yet."""

    def begin(self, request: CompileRequest) -> CompileWatch:
        """Dump the graphs of one compile, if the options name a folder."""
        if request.options.dump is None:
            return CompileWatch()
        path = request.options.dump.absolute()
        return _Dumping(self._folders.setdefault(path, DumpFolder(path)), request)


class _Dumping(CompileWatch):
    """One compile. It gets its number in the folder with its first graph: not every compiler shows graphs."""

    def __init__(self, folder: DumpFolder, request: CompileRequest) -> None:
        # Not the request: what is compiled keeps this, and would keep the model.
        self._begin: Callable[[], GraphDump | None] | None = partial(
            folder.begin,
            request.facts,
            of=f"{request.function}{request.capture.after}",
            codegen=request.options.codegen,
            strict=request.options.strict,
            most=request.options.dump_compiles,
            unit=request.unit,
            in_step=torch.is_grad_enabled(),
        )
        self._dump: GraphDump | None = None

    def write(self, gm: GraphModule, ctx: PassContext, *, number: int, record: PassRecord | None) -> None:
        """Write the graph, unless enough compiles were dumped."""
        if self._begin is not None:
            self._dump, self._begin = self._begin(), None
        if self._dump is not None:
            self._dump.write(gm, ctx, number=number, record=record)

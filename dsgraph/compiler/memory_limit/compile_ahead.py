"""Compilation of pipeline stages before their first run, so that an error is raised before anything is sent."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from dsgraph.compiler.request import CompileOutcome, CompileRequest, GraphCompiler
from dsgraph.passes.parallel.stages.stage_graphs import StageGraphModule

Compiled = Callable[..., Any]


class _NotRun(BaseException):
    """An exception in place of the run of a stage that is only compiled. No handler of an `Exception` may catch it."""

    def __init__(self, outcome: CompileOutcome) -> None:
        super().__init__()
        self.outcome = outcome


def compile_ahead(stage: StageGraphModule, run: Compiled, *args: Any) -> CompileOutcome:
    """Compile a stage for arguments without running it.

    Args:
        stage: The stage.
        run: The function that `torch.compile` returned for it.
        args: Arguments like those of later calls.

    Returns:
        The outcome of the compile.
    """
    stage.is_only_compiled = True
    try:
        run(*args)
    except _NotRun as stopped:
        return stopped.outcome
    finally:
        stage.is_only_compiled = False
    raise AssertionError("the stage ran")


def stop_if_only_compiled(compiled: Compiled, request: CompileRequest, compiler: GraphCompiler) -> Compiled:
    """Return `compiled`; for a pipeline stage, with a check that stops the run of a stage that is only compiled."""
    if not isinstance(request.module, StageGraphModule):
        return compiled
    module, outcome = weakref.ref(request.module), compiler.outcome

    def run(*args: Any) -> Any:
        stage = module()
        if stage is not None and stage.is_only_compiled:
            raise _NotRun(outcome)
        return compiled(*args)

    return run

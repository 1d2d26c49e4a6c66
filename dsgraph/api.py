"""The parts put together: importing this module registers the ops and the backend, with the tools that watch it."""

import os
from functools import partial

from torch.nn import Module

from dsgraph.compat.compiled import register_backend
from dsgraph.compat.torch_version import check_torch_version

check_torch_version()

from .compiler.backend import Backend
from .partitioning.rules import register_rules
from .partitioning.state import PartitionState
from .tools.bisecting.choice import read_bisecting
from .tools.dumping.dump_observer import DumpObserver
from .tools.emission.emission import read_target
from .tools.reporting.report import Report, report_on
from .tools.reporting.report_observer import ReportObserver


def new_backend(reports: ReportObserver | None = None) -> Backend:
    """Return a backend with its observers, and with the tools that may compile instead.

    Args:
        reports: Keeps the log of its compiles; by default a new one.
    """
    return Backend(
        observers=[reports or ReportObserver(), DumpObserver()],
        choices=[partial(read_bisecting, os.environ), partial(read_target, os.environ)],
    )


reports = ReportObserver()
backend = new_backend(reports)
register_backend(backend, "dsgraph")
register_rules()
PartitionState.planner = backend.plan_step


def report(model: Module) -> Report:
    """Return a report of what dsgraph did to a model and what it did not.

    Call it after the first step: graphs are compiled when they first run. Graphs are found by the parameters that they
    read and by the module that was being called. Two models of one class that are compiled by one `torch.compile` call
    share their entries for frames that Dynamo gave up on, because Dynamo identifies the code and not the model.

    Args:
        model: The module that was given to `partition` or `torch.compile`, or the compiled one.

    Raises:
        PartitionError: `model` is not a module.
    """
    return report_on(model, reports.log)

"""Everything that `import dsgraph` offers. Importing this module registers the ops and the backend."""

import os
from functools import partial

from torch.nn import Module

from . import checkpointing, compat

compat.check_torch_version()

from dsgraph.passes import GraphPass, PassContext, PassError, PassResult, Phase, Pipeline, graph_pass
from dsgraph.passes.kernels.spec import KernelSpec, Match, NearMiss

from .compiler.backend import Backend
from .compiler.compile import compile
from .compiler.custom_kernel import kernel
from .compiler.pipeline import default_pipeline
from .engine.engine import Engine
from .engine.initialize import add_config_arguments, initialize
from .errors import (
    AccumulationError,
    CheckpointError,
    ConfigError,
    EngineError,
    InferenceError,
    KernelError,
    LossScaleError,
    OffloadError,
    OptionError,
    PartitionError,
    PositionsError,
    RanksDisagreeError,
    StrictError,
)
from .inference.init_inference import init_inference
from .inference.quantize import quantize, save_quantized
from .offload.offload_optimizer import offload_optimizer
from .parallel.parallelize import parallelize
from .parallel.pipeline import pipeline
from .parallel.pipelined import PipelinedModel
from .parallel.tensor_parallel import tensor_parallel
from .sharding.materialize import materialize
from .sharding.positions import extend_positions
from .sharding.rules import register_rules
from .step.accumulate import accumulate, allreduce_gradients, discard
from .step.state import partition

from . import nn, ops, sparse  # isort: skip
from .tools.bisecting.choice import read_bisecting
from .tools.dumping.observer import DumpObserver
from .tools.emission.emission import read_target
from .tools.reporting.observer import ReportObserver
from .tools.reporting.report import Report, report_on

__all__ = [
    "AccumulationError",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineError",
    "GraphPass",
    "InferenceError",
    "KernelError",
    "KernelSpec",
    "LossScaleError",
    "Match",
    "NearMiss",
    "OffloadError",
    "OptionError",
    "PartitionError",
    "PassContext",
    "PassError",
    "PassResult",
    "Phase",
    "Pipeline",
    "PipelinedModel",
    "PositionsError",
    "RanksDisagreeError",
    "Report",
    "StrictError",
    "accumulate",
    "add_config_arguments",
    "allreduce_gradients",
    "backend",
    "checkpointing",
    "compile",
    "default_pipeline",
    "discard",
    "extend_positions",
    "graph_pass",
    "init_inference",
    "initialize",
    "kernel",
    "materialize",
    "nn",
    "offload_optimizer",
    "ops",
    "partition",
    "parallelize",
    "pipeline",
    "quantize",
    "report",
    "save_quantized",
    "sparse",
    "tensor_parallel",
]


def new_backend(reports: ReportObserver | None = None) -> Backend:
    """A backend with what sees its compiles, and with the tools that may compile instead.

    Args:
        reports: Keeps the log of its compiles; by default one that nobody asks.
    """
    return Backend(
        observers=[reports or ReportObserver(), DumpObserver()],
        choices=[partial(read_bisecting, os.environ), partial(read_target, os.environ)],
    )


reports = ReportObserver()
backend = new_backend(reports)
compat.register_backend(backend, "dsgraph")
register_rules()


def report(model: Module) -> Report:
    """What dsgraph did to a model and what it did not.

    Call it after the first step: graphs are compiled when they first run. Graphs are found by the parameters that they
    read and by the module that was being called. Two models of one class that are compiled by one torch function share
    their entries for frames that Dynamo gave up on, since Dynamo names the code and not the model.

    Args:
        model: The module that was given to `partition` or `torch.compile`, or the compiled one.

    Raises:
        PartitionError: `model` is not a module.
    """
    return report_on(model, reports.log)

"""dsgraph: distributed training as passes over the captured graph.

model = dsgraph.partition(model, mesh, stage=3)
model = torch.compile(model, backend="dsgraph")

Names are loaded when they are first used, or at once where torch is loaded already: the command line reads dumps
without torch, which takes seconds to load.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsgraph.passes import (
        GraphPass,
        PassContext,
        PassError,
        PassResult,
        Phase,
        Pipeline,
        graph_pass,
    )
    from dsgraph.passes.kernels.spec import KernelSpec, Match, NearMiss

    from . import checkpointing, nn, ops, sparse
    from .api import backend, report
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
    from .step.accumulate import accumulate, allreduce_gradients, discard
    from .step.state import partition
    from .tools.reporting.report import Report

__version__ = "0.1.0"

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


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _load()[name]
    raise AttributeError(f"module 'dsgraph' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load() -> dict[str, Any]:
    """Makes attributes of all names."""
    api = import_module("dsgraph.api")
    names = {name: getattr(api, name) for name in __all__}
    globals().update(names)
    return names


if "torch" in sys.modules:
    _load()

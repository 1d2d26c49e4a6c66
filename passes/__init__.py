"""The compiler: passes, the runner that runs them and the partitioner that calls it."""

import re
from pathlib import Path
from typing import NoReturn

from dsgraph.passes.ir.parameters import AxisRole, GraphInput, InputRole, MeshAxis

from .analysis.cost import CostModel
from .core.capture_facts import CaptureFacts
from .core.context import PassContext, Phase
from .core.graph_pair import GraphPair
from .core.graph_pass import FunctionPass, GraphPass, PassResult, graph_pass
from .core.pipeline import Pipeline
from .errors import PassError
from .ir.parameters import ParameterSpec
from .kernels.matching import call_of
from .kernels.registry import KERNELS
from .kernels.spec import Derived, Gain, KernelSpec, Match, NearMiss, Setting
from .runner.partitioner import InferenceLowering, Partitioner, Split
from .runner.runner import GraphSink, PassRecord, Runner

__all__ = [
    "KERNELS",
    "Derived",
    "Gain",
    "KernelSpec",
    "Match",
    "NearMiss",
    "Setting",
    "AxisRole",
    "CaptureFacts",
    "CostModel",
    "FunctionPass",
    "GraphInput",
    "GraphPair",
    "GraphPass",
    "GraphSink",
    "InputRole",
    "InferenceLowering",
    "MeshAxis",
    "ParameterSpec",
    "Partitioner",
    "PassContext",
    "PassError",
    "PassRecord",
    "PassResult",
    "Phase",
    "Pipeline",
    "Runner",
    "Split",
    "call_of",
    "graph_pass",
]


def __getattr__(name: str) -> NoReturn:
    """Raise an error that names the module of a built-in pass, whose file has the name of its class."""
    stem = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    for path in Path(__file__).parent.glob(f"*/{stem}.py"):
        module = f"{__name__}.{path.parent.name}.{stem}"
        raise ImportError(f"{__name__} does not export {name!r}: write `from {module} import {name}`")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Everything that `import dsgraph` offers. Importing this module registers the ops and the backend."""

import sys

from . import compat

compat.check_torch_version()

from dsgraph.passes import GraphPass, PassContext, PassError, PassResult, Phase, Pipeline, default_pipeline, graph_pass
from dsgraph.passes.kernels.spec import KernelSpec, Match, NearMiss

from .compiler.backend import backend
from .compiler.compile import compile
from .compiler.custom_kernel import kernel
from .errors import AccumulationError, KernelError, OptionError, PartitionError, RanksDisagreeError, StrictError
from .sharding.materialize import materialize
from .step.accumulate import accumulate, discard
from .step.state import partition
from .tools.reporting.report import Report, report

__all__ = [
    "AccumulationError",
    "GraphPass",
    "KernelError",
    "KernelSpec",
    "Match",
    "NearMiss",
    "OptionError",
    "PartitionError",
    "PassContext",
    "PassError",
    "PassResult",
    "Phase",
    "Pipeline",
    "RanksDisagreeError",
    "Report",
    "StrictError",
    "accumulate",
    "backend",
    "compile",
    "default_pipeline",
    "discard",
    "graph_pass",
    "kernel",
    "materialize",
    "partition",
    "report",
]

compat.register_backend(backend, "dsgraph")

# The package's names: `dsgraph.backend` is the backend from here on, not the module that defines it.
_package = sys.modules[__package__]
for _name in __all__:
    setattr(_package, _name, globals()[_name])

"""dsgraph: distributed training as passes over the captured graph.

model = dsgraph.partition(model, mesh, stage=3)
model = torch.compile(model, backend="dsgraph")
"""

from . import compat

compat.check_torch_version()

from dsgraph.passes import GraphPass, PassContext, PassError, PassResult, Phase, Pipeline, default_pipeline, graph_pass

from .accumulate import accumulate
from .backend import backend
from .compile import compile
from .errors import AccumulationError, OptionError, PartitionError, RanksDisagreeError, StrictError
from .materialize import materialize
from .partition import partition

compat.register_backend(backend, "dsgraph")

__version__ = "0.1.0"

__all__ = [
    "AccumulationError",
    "GraphPass",
    "OptionError",
    "PartitionError",
    "PassContext",
    "PassError",
    "PassResult",
    "Phase",
    "Pipeline",
    "RanksDisagreeError",
    "StrictError",
    "accumulate",
    "backend",
    "compile",
    "default_pipeline",
    "graph_pass",
    "materialize",
    "partition",
]

"""The table of public names: each is imported from the module that defines it.

Type checkers read it, and `__init__.py` does at run time.
"""

from dsgraph.passes import (
    GraphPass as GraphPass,
)
from dsgraph.passes import (
    PassContext as PassContext,
)
from dsgraph.passes import (
    PassError as PassError,
)
from dsgraph.passes import (
    PassResult as PassResult,
)
from dsgraph.passes import (
    Phase as Phase,
)
from dsgraph.passes import (
    Pipeline as Pipeline,
)
from dsgraph.passes import (
    graph_pass as graph_pass,
)
from dsgraph.passes.kernels.spec import KernelSpec as KernelSpec
from dsgraph.passes.kernels.spec import Match as Match
from dsgraph.passes.kernels.spec import NearMiss as NearMiss

from . import checkpointing as checkpointing
from . import nn as nn
from . import ops as ops
from . import sparse as sparse
from .api import backend as backend
from .api import report as report
from .compiler.build_pipeline import default_pipeline as default_pipeline
from .compiler.compile import compile as compile
from .compiler.custom_kernel import kernel as kernel
from .engine.engine import Engine as Engine
from .engine.initialize import add_config_arguments as add_config_arguments
from .engine.initialize import initialize as initialize
from .inference.init_inference import init_inference as init_inference
from .inference.quantization.quantize import quantize as quantize
from .inference.quantization.quantize import save_quantized as save_quantized
from .optim.offload_optimizer import offload_optimizer as offload_optimizer
from .parallel.parallelize import parallelize as parallelize
from .parallel.pipeline.pipeline import pipeline as pipeline
from .parallel.pipeline.pipelined import PipelinedModel as PipelinedModel
from .parallel.tensor.tensor_parallel import tensor_parallel as tensor_parallel
from .partitioning.accumulation.accumulate import accumulate as accumulate
from .partitioning.accumulation.accumulate import allreduce_gradients as allreduce_gradients
from .partitioning.accumulation.accumulate import discard as discard
from .partitioning.initialization.materialize import materialize as materialize
from .partitioning.initialization.positions import extend_positions as extend_positions
from .partitioning.partition import partition as partition
from .tools.reporting.report import Report as Report
from .utils.errors import AccumulationError as AccumulationError
from .utils.errors import CheckpointError as CheckpointError
from .utils.errors import ConfigError as ConfigError
from .utils.errors import EngineError as EngineError
from .utils.errors import GradientError as GradientError
from .utils.errors import InferenceError as InferenceError
from .utils.errors import KernelError as KernelError
from .utils.errors import LossScaleError as LossScaleError
from .utils.errors import OffloadError as OffloadError
from .utils.errors import OptionError as OptionError
from .utils.errors import PartitionError as PartitionError
from .utils.errors import PositionsError as PositionsError
from .utils.errors import RanksDisagreeError as RanksDisagreeError
from .utils.errors import StrictError as StrictError

__version__: str
__all__: list[str]

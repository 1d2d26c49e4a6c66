"""Floor 1, the compiler: passes, the runner that runs them and the partitioner that carries them."""

from .analysis.cost import CostModel
from .core.capture_facts import CaptureFacts
from .core.context import PassContext, Phase
from .core.graph_pair import GraphPair
from .core.graph_pass import FunctionPass, GraphPass, PassResult, graph_pass
from .core.pipeline import Pipeline
from .errors import PassError
from .ir.mesh_axis import AxisRole, MeshAxis
from .ir.parameters import ParamInfo
from .ir.roles import GraphInput, InputRole
from .kernels.matching import call_of
from .kernels.registry import KERNELS
from .kernels.sparsify_attention import SparsifyAttention
from .kernels.spec import Derived, Gain, KernelSpec, Match, NearMiss, Setting
from .kernels.substitute_kernels import SubstituteKernels
from .memory.offload import OffloadActivations
from .memory.offload_gradients import OffloadGradients
from .memory.partition_activations import PartitionActivations
from .memory.stream_parameters import StreamBackwardParameters, StreamForwardParameters
from .overlap.bucket_gathers import BucketBackwardGathers, BucketForwardGathers
from .overlap.bucket_reductions import BucketReductions
from .overlap.delay_reduction_waits import DelayReductionWaits
from .overlap.prefetch_gathers import PrefetchBackwardGathers, PrefetchForwardGathers
from .parallel.slice_tensors import SliceTensors
from .runner.partitioner import InferenceLowering, Partitioner, Split
from .runner.runner import GraphSink, PassRecord, Runner
from .zero.await_copies import AwaitCopies
from .zero.bucket_small_reductions import BucketSmallReductions
from .zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from .zero.compress_gathers import CompressGathers
from .zero.compress_reductions import CompressReductions
from .zero.insert_zero_collectives import InsertZeroCollectives
from .zero.keep_last_gather import KeepLastGather, ReleaseKeptGather
from .zero.lower_fake_weights import LowerFakeWeights
from .zero.merge_gathers import MergeGathers
from .zero.selective_gather import SelectiveGather

__all__ = [
    "KERNELS",
    "Derived",
    "Gain",
    "KernelSpec",
    "Match",
    "NearMiss",
    "Setting",
    "AwaitCopies",
    "AxisRole",
    "BucketBackwardGathers",
    "BucketForwardGathers",
    "BucketReductions",
    "BucketSmallReductions",
    "CaptureFacts",
    "ChooseCollectiveAlgorithms",
    "CompressGathers",
    "CompressReductions",
    "CostModel",
    "DelayReductionWaits",
    "FunctionPass",
    "GraphInput",
    "GraphPair",
    "GraphPass",
    "GraphSink",
    "InputRole",
    "InferenceLowering",
    "InsertZeroCollectives",
    "KeepLastGather",
    "LowerFakeWeights",
    "MergeGathers",
    "MeshAxis",
    "OffloadActivations",
    "OffloadGradients",
    "ParamInfo",
    "Partitioner",
    "PartitionActivations",
    "PassContext",
    "PassError",
    "PassRecord",
    "PassResult",
    "Phase",
    "Pipeline",
    "PrefetchBackwardGathers",
    "PrefetchForwardGathers",
    "ReleaseKeptGather",
    "Runner",
    "SelectiveGather",
    "Split",
    "SliceTensors",
    "SparsifyAttention",
    "StreamBackwardParameters",
    "StreamForwardParameters",
    "SubstituteKernels",
    "call_of",
    "graph_pass",
]

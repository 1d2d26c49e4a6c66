"""Floor 1, the compiler: passes, the runner that runs them and the partitioner that carries them."""

from .await_replicas import AwaitReplicas
from .base import FunctionPass, GraphPass, ParamInfo, PassContext, PassResult, Phase, graph_pass
from .bucket_gathers import BucketBackwardGathers, BucketForwardGathers
from .bucket_reductions import BucketReductions
from .bucket_small_reductions import BucketSmallReductions
from .choose_collective_algorithms import ChooseCollectiveAlgorithms
from .compress_gathers import CompressGathers
from .cost import CostModel
from .delay_reduction_waits import DelayReductionWaits
from .errors import PassError
from .insert_zero_collectives import InsertZeroCollectives
from .keep_last_gather import KeepLastGather, ReleaseKeptGather
from .merge_gathers import MergeGathers
from .mesh_axis import MeshAxis
from .partitioner import CaptureFacts, InferenceLowering, Partitioner
from .pipeline import Pipeline, default_pipeline
from .prefetch_gathers import PrefetchBackwardGathers, PrefetchForwardGathers
from .runner import GraphSink, PassRecord, Runner
from .selective_gather import SelectiveGather
from .substitute_kernels import SubstituteKernels

__all__ = [
    "AwaitReplicas",
    "BucketBackwardGathers",
    "BucketForwardGathers",
    "BucketReductions",
    "BucketSmallReductions",
    "CaptureFacts",
    "ChooseCollectiveAlgorithms",
    "CompressGathers",
    "CostModel",
    "DelayReductionWaits",
    "FunctionPass",
    "GraphPass",
    "GraphSink",
    "InferenceLowering",
    "InsertZeroCollectives",
    "KeepLastGather",
    "MergeGathers",
    "MeshAxis",
    "ParamInfo",
    "Partitioner",
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
    "SubstituteKernels",
    "default_pipeline",
    "graph_pass",
]

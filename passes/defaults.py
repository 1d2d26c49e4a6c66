"""The passes that run unless told otherwise, in their order."""

from __future__ import annotations

from .core.pipeline import Pipeline
from .kernels.substitute_kernels import SubstituteKernels
from .overlap.bucket_gathers import BucketBackwardGathers, BucketForwardGathers
from .overlap.bucket_reductions import BucketReductions
from .overlap.delay_reduction_waits import DelayReductionWaits
from .overlap.prefetch_gathers import PrefetchBackwardGathers, PrefetchForwardGathers
from .parallel.slice_tensors import SliceTensors
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


def default_pipeline() -> Pipeline:
    """The passes that `torch.compile(model, backend="dsgraph")` runs unless told otherwise."""
    return Pipeline(
        [
            MergeGathers(),
            SliceTensors(),
            SubstituteKernels(),
            CompressGathers(),
            BucketSmallReductions(),
            CompressReductions(),
            InsertZeroCollectives(),
            LowerFakeWeights(),
            ChooseCollectiveAlgorithms(),
            KeepLastGather(),
            SelectiveGather(),
            BucketForwardGathers(),
            PrefetchForwardGathers(),
            AwaitCopies(),
            ReleaseKeptGather(),
            BucketBackwardGathers(),
            PrefetchBackwardGathers(),
            BucketReductions(),
            DelayReductionWaits(),
        ]
    )

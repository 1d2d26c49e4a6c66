"""The list of passes: which passes compile a graph, in which order, with the options bound to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace

from dsgraph.passes import KERNELS, CaptureFacts, GraphPass, KernelSpec, PassError, Pipeline
from dsgraph.passes.kernels.sparsify_attention import SparsifyAttention
from dsgraph.passes.kernels.substitute_kernels import SubstituteKernels
from dsgraph.passes.memory.offload import OffloadActivations
from dsgraph.passes.memory.offload_gradients import OffloadGradients
from dsgraph.passes.memory.partition_activations import PartitionActivations
from dsgraph.passes.memory.stream_parameters import StreamBackwardParameters, StreamForwardParameters
from dsgraph.passes.overlap.bucket_gathers import BucketBackwardGathers, BucketForwardGathers
from dsgraph.passes.overlap.bucket_reductions import BucketReductions
from dsgraph.passes.overlap.delay_reduction_waits import DelayReductionWaits
from dsgraph.passes.overlap.prefetch_gathers import PrefetchBackwardGathers, PrefetchForwardGathers
from dsgraph.passes.parallel.lower_slices import LowerBackwardSlices, LowerForwardSlices
from dsgraph.passes.parallel.slice_tensors import SliceTensors
from dsgraph.passes.zero.await_copies import AwaitCopies
from dsgraph.passes.zero.bucket_small_reductions import BucketSmallReductions
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from dsgraph.passes.zero.compress_gathers import CompressGathers
from dsgraph.passes.zero.compress_reductions import CompressReductions
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from dsgraph.passes.zero.keep_last_gather import KeepLastGather, ReleaseKeptGather
from dsgraph.passes.zero.lower_fake_weights import LowerFakeWeights
from dsgraph.passes.zero.merge_gathers import MergeGathers
from dsgraph.passes.zero.selective_gather import SelectiveGather
from dsgraph.utils.errors import OptionError
from dsgraph.utils.nearest import nearest

from .options import BackendOptions

_PASSES_OF: dict[str, tuple[type[GraphPass], ...]] = {
    "kernels": (SubstituteKernels,),
    "gather_bucket_bytes": (BucketForwardGathers, BucketBackwardGathers),
    "reduce_bucket_bytes": (BucketReductions, BucketSmallReductions),
    "sequence_parallel": (SliceTensors,),
}
"""Options that set passes and do not add them: a list without these passes would ignore them."""


def build_pipeline(options: BackendOptions, facts: CaptureFacts, *, bound: Pipeline | None = None) -> Pipeline:
    """Return the passes that compile one captured graph.

    Args:
        options: The user's options.
        facts: The facts of the graph. A pass stays in the list if `GraphPass.applies` is true for them.
        bound: The result of `bind_options` for the options; None calls it.

    Raises:
        OptionError: The pipeline of the options cannot run, or an option contradicts it.
    """
    passes = list(bind_options(options) if bound is None else bound)
    on_disk = [item for item in (OffloadGradients(), *_streaming(options)) if item.applies(facts)]
    if on_disk and not any(isinstance(item, InsertZeroCollectives) for item in passes):
        raise OptionError(
            "parameters on disk are read and written by passes, which need InsertZeroCollectives in the pipeline: add "
            "that pass, or take 'parameters' out of partition(offload=...) (in the engine, offload_param)"
        )
    named = {item.name for item in passes}
    passes += [item for item in on_disk if item.name not in named]
    if facts.offload_tier is not None:  # the plan of the memory limit names the values that move
        passes = [replace(item, tier=None) if isinstance(item, OffloadActivations) else item for item in passes]
    if facts.is_step and facts.keeps_limit:
        passes = list(map(_as_counted, passes))
    return Pipeline(item for item in passes if item.applies(facts))


def _as_counted(item: GraphPass) -> GraphPass:
    """Return a pass that keeps no more in flight than the plans of blocks under a limit count."""
    if isinstance(item, PrefetchForwardGathers):
        return replace(item, ahead_bytes=0)
    return replace(item, in_flight_bytes=0) if isinstance(item, DelayReductionWaits) else item


def uncompiled_pipeline() -> Pipeline:
    """Return the passes for steps of an uncompiled model, whose peak is where most gradients are being reduced."""
    delayed = DelayReductionWaits(in_flight_bytes=8 * 2**20)
    return Pipeline(delayed if isinstance(item, DelayReductionWaits) else item for item in default_pipeline())


def default_pipeline() -> Pipeline:
    """Return the passes that run by default, in their order."""
    return Pipeline(_built_in(BackendOptions()))


def built_in_passes() -> list[type[GraphPass]]:
    """Return the class of each pass that this file can put in a list: those that it imports."""
    kinds = [value for value in globals().values() if isinstance(value, type) and value is not GraphPass]
    return [kind for kind in kinds if issubclass(kind, GraphPass)]


def bind_options(options: BackendOptions) -> Pipeline:
    """Return the passes of the options, for any graph: the built-in list, or the user's with the options bound to it.

    Raises:
        OptionError: The pipeline of the options cannot run, or an option contradicts it.
    """
    bound = {item.name: item for item in _built_in(options)}
    if options.pipeline is None:
        return Pipeline(bound.values())
    plain = {item.name: item for item in _built_in(BackendOptions())}
    try:
        given = Pipeline(_by_name(item, plain, bound) for item in options.pipeline)
        _refuse_without_effect(options, given)
        turned_off = plain.keys() - bound.keys()
        settings = bound | {item.name: item for item in _streaming(options)}
        passes = [_bound(item, settings.get(item.name)) for item in given if item.name not in turned_off]
        optional = [item for name, item in bound.items() if name not in plain]
        return Pipeline(_with_optional(passes, optional, order=list(bound)))
    except PassError as error:
        raise OptionError(f"option 'pipeline' is {_described(options.pipeline)}: {error}") from error


def _built_in(options: BackendOptions) -> list[GraphPass]:
    """Return the built-in passes that the options ask for, in their order."""
    gathers = {} if options.gather_bucket_bytes is None else {"bucket_bytes": options.gather_bucket_bytes}
    reductions = {} if options.reduce_bucket_bytes is None else {"bucket_bytes": options.reduce_bucket_bytes}
    overlap = options.overlap_comm
    return [
        MergeGathers(),
        SliceTensors(sequence_parallel=options.sequence_parallel),
        *([SparsifyAttention(options.sparse_attention)] if options.sparse_attention is not None else []),
        *([_substitute_kernels(options)] if options.kernels != "none" else []),
        CompressGathers(),
        BucketSmallReductions(**reductions),
        CompressReductions(),
        InsertZeroCollectives(),
        LowerFakeWeights(),
        ChooseCollectiveAlgorithms(),
        KeepLastGather(),
        SelectiveGather(),
        *([OffloadActivations(tier=options.activation_offload)] if options.activation_offload is not None else []),
        *([PartitionActivations()] if options.partition_activations else []),
        BucketForwardGathers(**gathers),
        *([PrefetchForwardGathers()] if overlap else []),
        AwaitCopies(),
        LowerForwardSlices(),
        ReleaseKeptGather(),
        BucketBackwardGathers(**gathers),
        *([PrefetchBackwardGathers()] if overlap else []),
        BucketReductions(**reductions),
        *([DelayReductionWaits()] if overlap else []),
        LowerBackwardSlices(),
    ]


def _streaming(options: BackendOptions) -> list[GraphPass]:
    ahead = {} if options.read_ahead_bytes is None else {"ahead_bytes": options.read_ahead_bytes}
    return [StreamForwardParameters(**ahead), StreamBackwardParameters(**ahead)]


def _substitute_kernels(options: BackendOptions) -> SubstituteKernels:
    if isinstance(options.kernels, str):
        return SubstituteKernels()
    asked = tuple(spec for spec in options.kernels if isinstance(spec, KernelSpec))
    automatic = KERNELS if "auto" in options.kernels else ()
    return SubstituteKernels(tuple(dict.fromkeys((*automatic, *asked))), asked=tuple(spec.name for spec in asked))


def _refuse_without_effect(options: BackendOptions, given: Pipeline) -> None:
    """Refuse options that set passes of which the user's list has none."""
    for name, kinds in _PASSES_OF.items():
        is_set = name in options.model_fields_set and getattr(options, name) not in (None, False)
        if is_set and not any(isinstance(item, kinds) for item in given):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise PassError(f"option {name!r} has no effect without {names}: add it, or remove the option")


def _by_name(item: GraphPass | str, plain: Mapping[str, GraphPass], bound: Mapping[str, GraphPass]) -> GraphPass:
    """Return the built-in pass of a name; a pass is returned as it is."""
    if not isinstance(item, str):
        return item
    if item not in plain:
        raise PassError(f"unknown pass {item!r}{nearest(item, plain)}; known: {', '.join(plain)}")
    if item not in bound:
        raise PassError(f"pass {item!r} is turned off by another option: remove one of the two")
    return plain[item]


def _bound(item: GraphPass, bound: GraphPass | None) -> GraphPass:
    """Return a pass of the user's list with its options set; list and options may not set the same field."""
    if bound is None or type(bound) is not type(item):
        return item
    plain = type(item)()
    changes = {}
    for field in fields(item):
        default, asked, own = (getattr(each, field.name) for each in (plain, bound, item))
        if asked != default and own not in (default, asked):
            raise PassError(f"an option sets {field.name} of {item}, which has its own: remove one of the two")
        if asked != default:
            changes[field.name] = asked
    return replace(item, **changes)


def _with_optional(
    passes: Sequence[GraphPass], optional: Iterable[GraphPass], *, order: Sequence[str]
) -> list[GraphPass]:
    """Return the list with optional passes that are missing, each before the first pass that it precedes by default."""
    found = list(passes)
    for item in optional:
        if any(type(other) is type(item) for other in found):
            continue
        later = order[order.index(item.name) + 1 :]
        place = next((at for at, other in enumerate(found) if other.name in later), len(found))
        found.insert(place, item)
    return found


def _described(pipeline: Iterable[object]) -> str:
    return f"[{', '.join(item.name if isinstance(item, GraphPass) else repr(item) for item in pipeline)}]"

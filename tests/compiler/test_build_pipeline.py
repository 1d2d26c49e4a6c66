from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import dsgraph
from dsgraph.compiler.build_pipeline import bind_options, build_pipeline
from dsgraph.compiler.options import parse_options
from dsgraph.inductor_ext.sparse.patterns import Fixed
from dsgraph.passes import KERNELS, CaptureFacts, GraphPass, ParameterSpec, PassResult, Phase, Pipeline
from dsgraph.passes.kernels.sparsify_attention import SparsifyAttention
from dsgraph.passes.kernels.substitute_kernels import SubstituteKernels
from dsgraph.passes.memory.offload import OffloadActivations
from dsgraph.passes.memory.stream_parameters import StreamForwardParameters
from dsgraph.passes.overlap.bucket_reductions import BucketReductions
from dsgraph.passes.parallel.slice_tensors import SliceTensors
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives

RMS_NORM = next(spec for spec in KERNELS if spec.name == "rms_norm")
STREAMING = ["offload_gradients", "stream_forward_parameters", "stream_backward_parameters"]


@dataclass(frozen=True)
class Late(GraphPass):
    """Does nothing, to the pair."""

    phase: ClassVar[Phase] = Phase.PAIR

    def run(self, gm, ctx):
        return PassResult()


def bind(**given):
    return bind_options(parse_options(given, {}))


def names(pipeline):
    return [item.name for item in pipeline]


def facts(tier="", **changes):
    info = ParameterSpec("weight", (4, 4), (2, 4), torch.float32, "0", requires_grad=True, tier=tier)
    return CaptureFacts(params={0: info}, **changes)


def build(facts, **given):
    return build_pipeline(parse_options(given, {}), facts)


def test_a_pass_that_does_not_apply_is_left_out():
    everything = dsgraph.default_pipeline()
    assert build(facts(is_sliced=True)) == everything
    assert names(build(CaptureFacts())) == ["slice_tensors", "substitute_kernels"]
    mine = names(build(CaptureFacts(), pipeline=everything + Late()))
    assert mine == ["slice_tensors", "substitute_kernels", "late"]


def test_parameters_on_disk_bring_their_passes():
    assert set(names(build(facts("disk", is_sliced=True)))) == {*names(dsgraph.default_pipeline()), *STREAMING}
    ahead = {item.name: item for item in build(facts("disk"), read_ahead_bytes=7)}
    assert [ahead[name].ahead_bytes for name in STREAMING[1:]] == [7, 7]
    assert set(names(build(facts("disk"), pipeline=[InsertZeroCollectives()]))) == {
        "insert_zero_collectives",
        *STREAMING,
    }
    with pytest.raises(dsgraph.OptionError, match=r"parameters on disk .* need InsertZeroCollectives in the pipeline"):
        build(facts("disk"), pipeline=[])


def test_a_plan_decides_what_is_offloaded():
    def tier(facts, **given):
        (found,) = [item for item in build(facts, **given) if isinstance(item, OffloadActivations)]
        return found.tier

    assert tier(facts(), activation_offload="host") == "host"
    assert tier(facts(offload_tier="host"), activation_offload="host") is None
    mine = [OffloadActivations("host", least_bytes=1)]
    assert tier(facts(offload_tier="host"), activation_offload="host", pipeline=mine) is None


def test_options_set_the_passes_of_a_users_list():
    mine = dsgraph.default_pipeline() + Late()
    found = {item.name: item for item in bind(pipeline=mine, reduce_bucket_bytes=7, activation_offload="disk")}
    assert found["bucket_reductions"] == BucketReductions(7)
    assert found["bucket_small_reductions"].bucket_bytes == 7
    assert list(found).index("offload_activations") == list(found).index("late") + 1
    own = [BucketReductions(7, latency_share=0.0), InsertZeroCollectives()]
    assert bind(pipeline=own, reduce_bucket_bytes=7) == Pipeline(own)
    (offload,) = bind(pipeline=[OffloadActivations(least_bytes=1)], activation_offload="host")
    assert offload == OffloadActivations("host", least_bytes=1)


def test_optional_passes_stand_in_their_place():
    found = names(bind(sparse_attention=Fixed(), activation_offload="host", partition_activations=True))
    assert [name for name in found if name not in names(dsgraph.default_pipeline())] == [
        "sparsify_attention",
        "offload_activations",
        "partition_activations",
    ]
    assert found.index("sparsify_attention") + 1 == found.index("substitute_kernels")
    assert names(bind(sparse_attention=Fixed(), pipeline=[SubstituteKernels()])) == [
        "sparsify_attention",
        "substitute_kernels",
    ]


def test_overlap_can_be_turned_off():
    overlap = {"prefetch_forward_gathers", "prefetch_backward_gathers", "delay_reduction_waits"}
    assert {*names(bind())} - {*names(bind(overlap_comm=False))} == overlap
    assert names(bind(overlap_comm=False, pipeline=dsgraph.default_pipeline())) == names(bind(overlap_comm=False))


def test_passes_may_be_named():
    mine = Late()
    found = bind(pipeline=["merge_gathers", mine, "insert_zero_collectives"])
    assert names(found) == ["merge_gathers", "insert_zero_collectives", "late"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"pipeline": [len]},
            r"option 'pipeline' is \[<built-in.*: a pipeline holds GraphPass objects, found <built-in",
        ),
        ({"pipeline": ["merge"]}, r"option 'pipeline' is \['merge'\]: unknown pass 'merge'; .*known: merge_gathers, "),
        (
            {"pipeline": ["insert_zero_collectives", "delay_reduction_waits"], "overlap_comm": False},
            "pass 'delay_reduction_waits' is turned off by another option: remove one of the two",
        ),
        ({"pipeline": ["prefetch_forward_gathers"]}, "pass prefetch_forward_gathers requires 'zero-collectives'"),
        (
            {"activation_offload": "host", "pipeline": [OffloadActivations(tier="disk")]},
            r"an option sets tier of OffloadActivations\(tier='disk'.*, which has its own: remove one of the two",
        ),
        (
            {"sparse_attention": Fixed(block=32), "pipeline": [SparsifyAttention(Fixed(block=64))]},
            r"an option sets layout of SparsifyAttention\(.*, which has its own",
        ),
        (
            {"reduce_bucket_bytes": 7, "pipeline": [SliceTensors()]},
            "option 'reduce_bucket_bytes' has no effect without BucketReductions or BucketSmallReductions: add it",
        ),
        (
            {"read_ahead_bytes": 7, "pipeline": [StreamForwardParameters(9)]},
            r"an option sets ahead_bytes of StreamForwardParameters\(.*, which has its own",
        ),
        (
            {"kernels": ["rms_norm"], "pipeline": [SliceTensors()]},
            r"option 'pipeline' is \[slice_tensors\]: option 'kernels' has no effect without SubstituteKernels",
        ),
    ],
)
def test_what_contradicts_is_named(given, message):
    with pytest.raises(dsgraph.OptionError, match=message):
        bind(**given)


def test_auto_in_a_list_means_the_automatic_kernels_as_well():
    def passes(kernels):
        return next(item for item in bind(kernels=kernels) if isinstance(item, SubstituteKernels))

    mine = replace(RMS_NORM, name="mine")
    for kernels in (["auto", mine], [mine, "auto"]):
        assert (passes(kernels).kernels, passes(kernels).asked) == ((*KERNELS, mine), ("mine",))
    assert (passes(["auto", "rms_norm"]).kernels, passes(["auto", "rms_norm"]).asked) == (KERNELS, ("rms_norm",))
    assert (passes(["auto"]).kernels, passes(["auto"]).asked) == (KERNELS, ())
    with pytest.raises(dsgraph.OptionError, match="two kernels of the name 'rms_norm'"):
        bind(kernels=["auto", replace(RMS_NORM)])


def test_kernels_set_what_the_pipeline_substitutes():
    def substituting(**given):
        return [item for item in bind(**given) if isinstance(item, SubstituteKernels)]

    (auto,) = substituting()
    assert auto == SubstituteKernels() and substituting(kernels="auto") == [auto]
    assert substituting(kernels="none") == []
    (asked,) = substituting(kernels=["rms_norm"])
    assert asked.asked and [spec.name for spec in asked.kernels] == ["rms_norm"]
    assert substituting(kernels=[asked.kernels[0]]) == [asked]
    assert substituting(kernels=["rms_norm", asked.kernels[0]]) == [asked]

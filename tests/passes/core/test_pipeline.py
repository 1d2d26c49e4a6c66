from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch.fx import GraphModule

import dsgraph
from dsgraph import default_pipeline
from dsgraph.passes import GraphPass, PassContext, PassError, PassResult, Phase, Pipeline, graph_pass


@dataclass(frozen=True)
class Late(GraphPass):
    amount: int = 1
    phase: ClassVar[Phase] = Phase.BACKWARD

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        return PassResult()


@graph_pass(phase="forward", requires={"zero-collectives"})
def early(gm, ctx):
    return 0


def test_passes_run_phase_by_phase_in_the_order_listed():
    pipeline = default_pipeline() + [Late(), early]
    assert [item.name for item in pipeline] == [
        "merge_gathers",
        "slice_tensors",
        "substitute_kernels",
        "compress_gathers",
        "bucket_small_reductions",
        "compress_reductions",
        "insert_zero_collectives",
        "lower_fake_weights",
        "choose_collective_algorithms",
        "keep_last_gather",
        "selective_gather",
        "bucket_forward_gathers",
        "prefetch_forward_gathers",
        "await_copies",
        "lower_forward_slices",
        "early",
        "release_kept_gather",
        "bucket_backward_gathers",
        "prefetch_backward_gathers",
        "bucket_reductions",
        "delay_reduction_waits",
        "lower_backward_slices",
        "late",
    ]
    assert [item.name for item in pipeline.of(Phase.FORWARD)] == [
        "bucket_forward_gathers",
        "prefetch_forward_gathers",
        "await_copies",
        "lower_forward_slices",
        "early",
    ]


def test_missing_requirement_is_named():
    with pytest.raises(PassError, match=r"pass early requires 'zero-collectives'.*add a pass that provides"):
        Pipeline([early])


def test_without():
    assert "merge_gathers" not in {item.name for item in default_pipeline().without("merge_gathers")}
    with pytest.raises(PassError, match="no pass called 'merge_gaters'"):
        default_pipeline().without("merge_gaters")


def test_what_is_no_pass_is_refused():
    with pytest.raises(PassError, match=r"found <class .*Late.*make an instance"):
        Pipeline([Late])


def test_two_passes_of_one_name_are_refused():
    with pytest.raises(PassError, match="late stands in the pipeline twice"):
        Pipeline([Late(1), Late(2)])


def test_unknown_phase_is_refused():
    with pytest.raises(PassError, match="phase is 'middle'; it takes one of capture, joint, pair, forward, backward"):
        graph_pass(phase="middle")
    with pytest.raises(PassError, match='has no phase "capture": take graph="unit"'):
        graph_pass(phase="capture", graph="step")


def test_a_class_without_a_phase_is_refused():
    @dataclass(frozen=True)
    class Timeless(GraphPass):
        def run(self, gm, ctx):
            return PassResult()

    with pytest.raises(PassError, match="pass timeless has no phase: give Timeless a class attribute"):
        Pipeline([Timeless()])


def test_one_pass_can_be_added_without_a_list():
    assert default_pipeline() + early == default_pipeline() + [early]


def test_fingerprint_tells_options_and_code_apart():
    assert Late(1).fingerprint() == Late(1).fingerprint()
    assert Late(1).fingerprint() != Late(2).fingerprint()
    assert early.fingerprint() != Late(1).fingerprint()
    assert default_pipeline().fingerprint() == default_pipeline().fingerprint()


def test_a_closure_cannot_be_identified():
    secret = 3

    @graph_pass(phase="joint")
    def hidden(gm, ctx):
        return secret

    assert hidden.fingerprint() is None
    assert Pipeline([hidden]).fingerprint() is None


def test_public_names():
    assert dsgraph.Pipeline is Pipeline
    assert dsgraph.graph_pass is graph_pass

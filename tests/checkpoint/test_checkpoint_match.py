"""Checks that a checkpoint is of the same model and optimizer."""

from __future__ import annotations

from dsgraph.checkpoint.checkpoint_match import why_damaged


def test_a_pipelines_checkpoint_of_an_earlier_version_is_named():
    about = {"kind": "parallel layout", "tensors": {}, "optimizer_class": "AdamW", "likes": {}, "more": {}}
    problem = why_damaged(about)
    assert "an earlier version of dsgraph wrote it for a parallel layout" in problem
    assert problem.endswith("load it with that version, or train again")

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.passes.ir.graph import find_calls
from dsgraph.passes.ir.save_plan import Choice, SavePlan, decide, inherit, is_recomputed, must
from tests.passes.tracing import trace

aten = torch.ops.aten


def _graph():
    gm = trace(lambda x: (x.sin().cos(), x.exp()), torch.randn(3))
    return gm, *(find_calls(gm, op)[0] for op in (aten.sin.default, aten.cos.default, aten.exp.default))


def test_a_plan_that_was_written_is_read():
    gm, sin, cos, exp = _graph()
    SavePlan({"sin": Choice.RECOMPUTE, "exp": Choice.SAVE}).write(gm)
    assert SavePlan.of(gm).choices == {"sin": Choice.RECOMPUTE, "exp": Choice.SAVE}
    assert must(sin, Choice.RECOMPUTE) and is_recomputed(sin) and must(exp, Choice.SAVE) and not is_recomputed(exp)
    assert not must(cos, Choice.SAVE) and not is_recomputed(cos)


def test_torchs_partitioner_reads_the_plan():
    _, sin, _, exp = _graph()
    decide(sin, Choice.RECOMPUTE)
    decide(exp, Choice.SAVE)
    assert sin.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE
    assert exp.meta["recompute"] is CheckpointPolicy.MUST_SAVE


def test_what_a_checkpoint_region_wishes_is_no_choice():
    gm, sin, _, _ = _graph()
    sin.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    assert SavePlan.of(gm) == SavePlan(choices={})
    assert is_recomputed(sin) and not must(sin, Choice.RECOMPUTE)


def test_a_replacement_inherits():
    _, sin, cos, exp = _graph()
    decide(sin, Choice.RECOMPUTE)
    inherit(exp, sin)
    inherit(sin, cos)
    assert must(exp, Choice.RECOMPUTE) and must(sin, Choice.RECOMPUTE)


def test_a_node_that_is_not_there_is_named():
    gm, *_ = _graph()
    with pytest.raises(KeyError, match="tan"):
        SavePlan({"tan": Choice.SAVE}).write(gm)

"""The table of ZeRO stages."""

from __future__ import annotations

import pytest
from torch import nn

import dsgraph
from dsgraph.partitioning.stages import STAGES, CopyLifetime


def test_the_table():
    found = {
        number: (
            stage.splits_parameters,
            stage.copy_lifetime,
            stage.may_reduce_once,
            stage.may_reduce_in_every_backward,
        )
        for number, stage in STAGES.items()
    }
    assert found == {
        0: (False, CopyLifetime.NONE, True, False),
        1: (True, CopyLifetime.ALWAYS, True, False),
        2: (True, CopyLifetime.ALWAYS, True, True),
        3: (True, CopyLifetime.USE, False, True),
    }
    assert all(stage.number == number for number, stage in STAGES.items())


@pytest.mark.parametrize(("number", "reduces_once"), [(0, True), (1, True), (2, False), (3, False)])
def test_what_accumulate_does_by_itself_is_allowed(number, reduces_once):
    stage = STAGES[number]
    assert stage.reduces_once is reduces_once
    assert stage.allows(reduce_once=reduces_once)
    assert stage.allows(reduce_once=not reduces_once) is (number == 2)


@pytest.mark.parametrize("stage", [4, -1, 1.0, True, "3", [3]])
def test_no_other_stage_is_taken(stage):
    with pytest.raises(dsgraph.PartitionError, match="ZeRO stages are 0, 1, 2 and 3"):
        dsgraph.partition(nn.Linear(4, 4), stage=stage)

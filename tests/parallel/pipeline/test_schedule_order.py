"""Orders of pipeline schedules: which are refused, and by what name."""

from __future__ import annotations

import pytest

from dsgraph.parallel.pipeline.schedule_order import (
    actions_of,
    bubble_share,
    check_microbatches,
    check_order,
    most_deferred,
    most_in_flight,
    stages_of_ranks,
)
from dsgraph.utils.errors import OptionError


def test_one_forward_one_backward():
    order = actions_of(None, "1F1B", stages=2, microbatches=3)
    assert order[0] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert order[1] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    check_order(order, stages=2)
    check_order(actions_of(None, "GPipe", stages=4, microbatches=8), stages=4)


def test_micro_batches_in_flight():
    for kind, most in (("1F1B", [3, 2, 1]), ("GPipe", [6, 6, 6])):
        order = actions_of(None, kind, stages=3, microbatches=6)
        assert [most_in_flight(order[stage])[stage] for stage in range(3)] == most
    assert most_in_flight(["0F0", "0F1", "2F0", "2B0", "0B0", "0I1", "0F2", "0W1"]) == {0: 2, 2: 1}


def test_what_waits_for_weight_gradients_is_counted_over_all_stages_of_a_rank():
    order = ["0F0", "2F0", "2I0", "0I0", "2F1", "2I1", "2W0", "0W0", "2W1"]
    assert most_deferred(order, {0: 10, 2: 1}) == 12
    assert most_deferred(["0F0", "0B0", "0F1", "0B1"], {0: 10}) == 10  # one backward, with its weight gradients


def test_a_cycle_is_named():
    with pytest.raises(OptionError, match=r"deadlocks: rank 0 at 0B0, rank 1 at 1F1"):
        check_order({0: ["0F0", "0B0", "0F1", "0B1"], 1: ["1F0", "1F1", "1B0", "1B1"]}, stages=2)


def test_gradients_of_weights_wait_for_those_of_inputs():
    check_order({0: ["0F0", "0I0", "0W0"], 1: ["1F0", "1I0", "1W0"]}, stages=2)
    with pytest.raises(OptionError, match="rank 1 at 1W0"):
        check_order({0: ["0F0", "0I0"], 1: ["1F0", "1W0", "1I0"]}, stages=2)


@pytest.mark.parametrize(("kind", "stages", "wanted"), (("1F1B", 4, "2"), ("Interleaved1F1B", 3, "a multiple of 2")))
def test_stages_that_do_not_fit(kind, stages, wanted):
    with pytest.raises(OptionError, match=f"takes {wanted} stages, not {stages}"):
        stages_of_ranks(kind, ranks=2, stages=stages)


@pytest.mark.parametrize(
    ("kind", "ranks", "count", "message"),
    [
        ("Interleaved1F1B", 4, 13, "in 3 equal rounds, which 13 do not fill: use 12 or 15"),
        ("InterleavedZeroBubble", 2, 5, "use 4 or 6 micro-batches"),
        ("DualPipeV", 2, 3, "3 micro-batches are fewer than 4 stages: use at least 4"),
        ("GPipe", 2, 2.0, "microbatches is 2.0; it takes a whole number"),
    ],
)
def test_micro_batches_that_a_schedule_cannot_run_are_refused(kind, ranks, count, message):
    with pytest.raises(OptionError, match=message):
        check_microbatches(kind, ranks=ranks, stages=2 * ranks if kind != "GPipe" else ranks, microbatches=count)
    check_microbatches(kind, ranks=ranks, stages=2 * ranks, microbatches=4 * ranks)


def test_where_stages_lie():
    assert stages_of_ranks("Interleaved1F1B", ranks=2, stages=4) == [[0, 2], [1, 3]]
    assert stages_of_ranks("ZBVZeroBubble", ranks=2, stages=4) == [[0, 3], [1, 2]]
    with pytest.raises(OptionError, match="'zbv' is unknown; known are GPipe"):
        stages_of_ranks("zbv", ranks=2, stages=4)


def test_the_bubble_of_one_stage_a_rank_is_the_known_one():
    for kind, batches in (("GPipe", 8), ("1F1B", 16)):
        slots = check_order(actions_of(None, kind, stages=4, microbatches=batches), stages=4)
        assert bubble_share(slots) == pytest.approx(3 / (batches + 3))


def test_an_action_starts_when_what_it_reads_is_there():
    joint = "(1F1;1B0)OVERLAP_F_B"
    slots = check_order({0: ["0F0", "0F1", "0B0", "0B1"], 1: ["1F0", joint, "1B1"]}, stages=2)
    times = {slot.action: (slot.start, slot.end) for slot in slots}
    assert times == {
        **{"0F0": (0, 1), "0F1": (1, 2), "0B0": (5, 7), "0B1": (7, 9)},
        **{"1F0": (1, 2), joint: (2, 5), "1B1": (5, 7)},
    }
    assert next(slot.kinds for slot in slots if slot.action == joint) == [("F", 1), ("B", 2)]

"""`benchmarks.limits`: what it computes from rows."""

from __future__ import annotations

from benchmarks import limits


def test_checks_hold_a_step_against_the_longer_of_computing_and_the_disk():
    disk = {"case": "disk", "saved_mb": 800.0, "limit_mb": 100.0, "peak_mb": 90.0, "step_s": 6.0, "free_s": 2.0}
    rows = [
        {**disk, "disk_s": 4.0, "plan_s": 1.0},
        {"case": "planning", "plan_s": 12.0},
        {"case": "planning, blocks", "plan_s": 1.0},
    ]
    share, peak, step, planning, blocks = limits.checks(rows)
    assert (share.value, share.ok) == (8.0, False)
    assert (peak.value, peak.ok) == (0.9, True)
    assert (step.value, step.limit) == (1.5, 1.3)
    assert (planning.value, planning.ok) == (12.0, False)
    assert (blocks.value, blocks.limit, blocks.ok) == (1.0, 2.0, True)

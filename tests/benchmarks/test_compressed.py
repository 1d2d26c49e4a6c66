"""`benchmarks.compressed`: what it computes from rows."""

from __future__ import annotations

from benchmarks import compressed


def test_dropped_layers_are_held_against_all_layers():
    rows = [
        {"system": system, "early_s": 1.0, "late_s": late, "mean_s": mean, "loss": loss}
        for system, late, mean, loss in (("all", 1.0, 1.0, 2.0), ("dropped", 0.75, 0.9, 2.03))
    ]
    late, mean = compressed.checks(rows)
    assert (late.value, late.ok) == (0.75, True)
    assert (mean.value, mean.ok) == (0.9, False)

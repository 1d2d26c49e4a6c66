"""`benchmarks.sparse`: what it computes from rows, and rows that a part leaves alone."""

from __future__ import annotations

import json

from benchmarks import sparse


def test_checks_are_of_the_longest_sequence():
    plain = {"length": 16, "density": 0.1}
    rows = [
        {"system": "dense", "length": 16, "speed-up": 1.0, "of ideal": 1.0, "peak_mb": 100.0},
        {**plain, "system": "fixed", "length": 8, "speed-up": 99.0, "of ideal": 99.0},
        {**plain, "system": "fixed", "speed-up": 7.0, "of ideal": 0.7, "peak_mb": 130.0},
        {**plain, "system": "bslongformer", "speed-up": 5.0, "of ideal": 0.5, "peak_mb": 110.0},
        {"system": "eager", "longest": 4},
        {"system": "bslongformer", "longest": 48},
        *({"system": name, "loss": loss} for name, loss in (("dense", 2.0), ("fixed", 2.1), ("bslongformer", 2.0))),
    ]
    found = {check.name: (check.value, check.ok) for check in sparse.checks(rows, 16)}
    assert found["fixed: times faster than dense attention at 16 tokens"] == (7.0, True)
    assert found["fixed: memory over dense attention's"] == (1.3, False)
    assert found["fixed: held-out loss over dense"] == (1.05, False)
    assert found["bslongformer: times faster than dense attention at 16 tokens"] == (5.0, False)
    assert found["bslongformer: share of the ideal speed-up, 1 / density"] == (0.5, False)
    assert found["bslongformer: held-out loss over dense"] == (1.0, True)
    assert found["longest sequence in 4 GiB over dense eager attention's"] == (12.0, True)


def test_a_part_keeps_the_rows_of_the_other(tmp_path):
    path = tmp_path / "sparse.json"
    losses = [{"system": "dense", "loss": 2.0}]
    path.write_text(json.dumps({"rows": losses}))
    assert sparse.kept_rows(path) == losses
    assert sparse.kept_rows(tmp_path / "none.json") == []
    assert sparse.kept_rows(None) == []

"""`benchmarks.families`: what it computes from rows, and wrong arguments."""

from __future__ import annotations

import pytest

from benchmarks import families


def test_checks_hold_each_family_against_fsdp2():
    rows = [
        {"family": "llama", "system": "dsgraph", "first_step_s": 12.0, "step_s": 0.5},
        {"family": "llama", "system": "fsdp2", "first_step_s": 10.0, "step_s": 1.0},
        {"family": "bert", "system": "dsgraph", "first_step_s": 12.0, "step_s": 0.5},
    ]
    first, step = families.checks(rows)
    assert (first.name, first.value, first.ok) == ("llama: first step over FSDP2's", 1.2, False)
    assert (step.value, step.ok) == (0.5, True)


def test_an_unknown_family_is_refused():
    with pytest.raises(SystemExit) as error:
        families.main(["--families", "lama"])
    assert error.value.code == 2

"""`benchmarks.first_step`: what it computes from rows, and wrong arguments."""

from __future__ import annotations

import pytest

from benchmarks import first_step


def _row(layers: int, system: str, first_step_s: float, **columns: object) -> dict[str, object]:
    return {"layers": layers, "system": system, "first_step_s": first_step_s, "step_s": 1.0, "peak_mb": None, **columns}


def test_checks_hold_deep_models_against_shallow_ones_and_blocks_against_one_graph():
    rows = [_row(4, "blocks", 20.0), _row(24, "blocks", 30.0), _row(24, "flat", 60.0, step_s=0.5)]
    deep, step = first_step.checks(rows)
    assert (deep.value, deep.limit, deep.ok) == (29 / 19, 1.1, False)
    assert (step.name, step.value, step.limit) == ("blocks: step time, 24 layers, over flat", 2.0, 0.9)


def test_warm_starts_are_held_against_those_of_the_same_system():
    rows = [_row(layers, "blocks", 20.0, warm_s=warm) for layers, warm in ((4, 2.0), (96, 5.0))]
    assert [(item.name, item.value) for item in first_step.checks(rows) if "warm" in item.name] == [
        ("warm start, 96 layers over 4", 2.5)
    ]


@pytest.mark.parametrize("arguments", [["--layers", "4,many"], ["--systems", "magic"]])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as error:
        first_step.main(arguments)
    assert error.value.code == 2

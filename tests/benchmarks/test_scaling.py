"""`benchmarks.scaling`: what it computes from rows, and a smoke run."""

from __future__ import annotations

import json

import pytest

import dsgraph
from benchmarks import scaling

COLUMNS = [
    *("layers", "ranks", "compile_s", "passes_s", "share", "us_a_node", "verify_s", "forward_nodes", "backward_nodes"),
    *("collectives", "sent_mb", "compute_s", "exposed_s", "bucket_mb", "passes"),
]


def row(layers: int, **columns: object) -> dict[str, object]:
    return {"layers": layers, "ranks": 8, "share": 0.05, "us_a_node": 100.0, "bucket_mb": 0.0, **columns}


def test_checks_are_medians_over_the_numbers_of_ranks():
    rows = [row(24, us_a_node=80.0), row(24, us_a_node=100.0), row(24, us_a_node=300.0)]
    rows += [row(96, us_a_node=160.0, share=0.12), row(12, share=0.9)]
    share, growth = scaling.checks(rows)
    assert (share.value, share.limit, share.ok) == (0.12, 0.10, False)
    assert (growth.value, growth.limit, growth.ok) == (pytest.approx(1.6), 1.5, False)


def test_checks_of_depths_that_did_not_run_are_left_out():
    assert scaling.checks([]) == scaling.checks([row(12), row(24)]) == []
    assert [check.limit for check in scaling.checks([row(96)])] == [0.10]


def test_the_largest_bucket_is_held_against_the_bound_of_the_passes():
    (check,) = scaling.checks([row(12, bucket_mb=20.0), row(12, bucket_mb=27.0)])
    assert (check.limit, check.ok) == (1.0, False) and check.value == pytest.approx(27e6 / (25 * 2**20))


def test_passes_that_touch_communication():
    names = scaling.communication_passes()
    assert {"merge_gathers", "insert_zero_collectives", "delay_reduction_waits"} <= names
    assert names <= {item.name for item in dsgraph.default_pipeline()}


@pytest.mark.parametrize("arguments", [["--layers", "12,many"], ["--ranks", "0"]])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as error:
        scaling.main(arguments)
    assert error.value.code == 2


@pytest.mark.full  # it takes long, and its parts have tests
@pytest.mark.slow
def test_smoke_run_writes_the_schema(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert scaling.main(["--quick", "--json", str(out)]) == 0
    read = json.loads(out.read_text())
    one, two = read["rows"]
    assert list(one) == list(two) == COLUMNS
    assert (one["layers"], two["layers"], one["ranks"]) == (1, 2, 8)
    for name in ("forward_nodes", "backward_nodes", "compute_s"):
        assert 0 < one[name] < two[name]
    for line in (one, two):
        on_communication = [line["passes"][name] for name in scaling.communication_passes() & line["passes"].keys()]
        assert line["passes_s"] == pytest.approx(sum(on_communication))
        assert line["share"] == pytest.approx(line["passes_s"] / line["compile_s"])
        assert line["exposed_s"] >= 0 and line["sent_mb"] > 0 and line["collectives"] > 0
    assert [(check["name"], check["ok"]) for check in read["checks"]] == [("largest bucket over bucket_bytes", True)]
    assert "us_a_node" in capsys.readouterr().out

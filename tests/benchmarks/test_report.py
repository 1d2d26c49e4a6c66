"""The convention of all benchmarks: rows, checks, machine."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from benchmarks.report import Check, Report, add_arguments, machine, ratio, table


@pytest.mark.parametrize(
    ("value", "better", "ok"),
    [
        (0.79, "lower", True),
        (0.8, "lower", True),
        (0.81, "lower", False),
        (0.79, "higher", False),
        (0.8, "higher", True),
        (None, "lower", False),
        (None, "higher", False),
        (math.nan, "lower", False),
    ],
)
def test_check_knows_whether_the_figure_was_reached(value, better, ok):
    assert Check("time", value, 0.8, better).ok is ok


def test_file_holds_rows_checks_and_machine(tmp_path):
    report = Report(rows=[{"system": "ddp", "step_s": None}], checks=[Check("time", 0.5, 0.8, "lower")])
    report.write(tmp_path / "folder" / "out.json")
    read = json.loads((tmp_path / "folder" / "out.json").read_text())
    assert read["rows"] == [{"system": "ddp", "step_s": None}]
    assert read["checks"] == [{"name": "time", "value": 0.5, "limit": 0.8, "better": "lower", "ok": True}]
    assert read["machine"]["torch"] and read["machine"]["cores"]


def test_no_file_without_the_flag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Report().write(None)
    assert not list(tmp_path.iterdir())


def test_a_missed_figure_is_printed(capsys):
    Report(checks=[Check("time", 0.9, 0.8, "lower"), Check("memory", None, 0.9, "lower")]).print()
    printed = capsys.readouterr().out
    assert "MISSED" in printed and "not measured" in printed and "at most 0.8" in printed


def test_flags_are_the_same_everywhere():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args([]) == argparse.Namespace(json=None, quick=False)
    assert parser.parse_args(["--json", "a.json", "--quick"]) == argparse.Namespace(json=Path("a.json"), quick=True)


def test_machine_tells_a_missing_package():
    found = machine(["torch", "no-such-distribution"])
    assert found["torch"] and found["no-such-distribution"] is None


def test_ratio_is_to_the_smallest_that_is_known():
    assert ratio(2.0, [4.0, None, 8.0]) == 0.5
    assert ratio(None, [4.0]) is None
    assert ratio(2.0, [None]) is None
    assert ratio(2.0, []) is None


def test_table_shows_what_is_missing_and_losses_in_full():
    lines = table([{"system": "ddp", "step_s": 1.23456, "loss": 9.1269168}, {"system": "x", "step_s": None}]).split(
        "\n"
    )
    assert lines[2].split() == ["ddp", "1.235", "9.1269168"]
    assert lines[3].split() == ["x", "-", "-"]

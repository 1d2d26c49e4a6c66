"""The script that checks each version of torch: how it counts, and what it writes into the page."""

from __future__ import annotations

import pytest

from tests.versions import HEAD, PAGE, PAIRS, merge_rows, read_junit

PAGE_WITHOUT_ROWS = "# Versions\n\n<!-- versions -->\n<!-- /versions -->\n\nMore.\n"


def _row(torch: str, python: str, passed: str, *, tests: str = "small tier") -> list[str]:
    return [torch, python, "5.24.0", "2026-11-26", tests, passed, "0", "3", "25", "works"]


def _table(page: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_failure_in_a_fixture_counts_and_is_named_once(tmp_path):
    file = tmp_path / "junit.xml"
    file.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.a" name="passes"/>
        <testcase classname="tests.a" name="fails"><failure/></testcase>
        <testcase classname="tests.a" name="stops"><error/></testcase>
        <testcase classname="tests.a" name="stops"><error/></testcase>
        <testcase classname="tests.b" name="skips"><skipped/></testcase>
        </testsuite></testsuites>"""
    )
    counts = read_junit(file)
    assert (counts.passed, counts.failed, counts.skipped) == (1, ("tests.a::fails", "tests.a::stops"), 1)


def test_rows_are_written_newest_first_and_the_rest_of_the_page_stays():
    page = merge_rows(PAGE_WITHOUT_ROWS, [_row("2.9.0", "3.10.13", "1"), _row("2.15.0+cu132", "3.13.0", "2")])
    assert [row[0] for row in _table(page)[2:]] == ["2.15.0+cu132", "2.9.0"]
    assert page.startswith("# Versions\n\n<!-- versions -->\n|") and page.endswith("|\n<!-- /versions -->\n\nMore.\n")


def test_a_later_run_of_the_same_tests_replaces_its_row_alone():
    first = [
        _row("2.15.0", "3.13.0", "1"),
        _row("2.14.1", "3.12.1", "2"),
        _row("2.15.0", "3.13.0", "3", tests="tests/a"),
    ]
    page = merge_rows(merge_rows(PAGE_WITHOUT_ROWS, first), [_row("2.15.1+cpu", "3.13.2", "9")])
    assert [(row[0], row[5]) for row in _table(page)[2:]] == [("2.15.1+cpu", "9"), ("2.15.0", "3"), ("2.14.1", "2")]


def test_the_page_has_a_place_for_the_table():
    text = merge_rows(PAGE.read_text(), [])
    assert text.count("<!-- versions -->") == text.count("<!-- /versions -->") == 1
    assert _table(text)[0] == list(HEAD)


@pytest.mark.parametrize("torch", PAIRS)
def test_every_pair_is_a_supported_version(torch):
    from dsgraph.compat.torch_version import NEWEST_TORCH, OLDEST_TORCH

    assert OLDEST_TORCH <= tuple(map(int, torch.split("."))) <= NEWEST_TORCH

"""Compare the tables of README and docs with the files under `benchmarks/results/`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.tables import PAGES, RESULTS, ROOT, TABLES, filled, main


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_show_what_was_measured(page):
    text = page.read_text()
    assert filled(text, page) == text, "run python -m benchmarks.tables"


def test_every_file_of_results_and_every_table_is_shown():
    text = "".join(page.read_text() for page in PAGES)
    assert {path.name for path in RESULTS.glob("*.json")} <= set(re.findall(r"benchmarks/results/([\w-]+\.json)", text))
    assert set(TABLES) == set(re.findall(r"<!-- table: (.+) -->", text))


def test_no_table_of_benchmarks_is_typed():
    for page in (ROOT / "docs" / "benchmarks").glob("*.md"):
        typed = re.sub(r"<!-- table: .+? -->.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        assert not [line for line in typed.splitlines() if line.startswith("|")], page.name


def test_what_stands_between_the_marks_is_replaced_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- table: results -->\nstale\n<!-- end -->\nbehind\n<!-- table: dumps -->\n<!-- end -->\n"
    )
    assert main([str(page)]) == 0
    first = page.read_text()
    assert first.startswith("before\n<!-- table: results -->\n\n| ") and "\n<!-- end -->\nbehind\n" in first
    assert "stale" not in first and "dumps-cpu.json" in first
    assert main([str(page)]) == 0
    assert page.read_text() == first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: nothing -->\n<!-- end -->\n", "no table is called 'nothing'"),
        ("<!-- table: zero -->\n", "no <!-- end -->"),
        ("<!-- table: zero -->\n<!-- table: dumps -->\n<!-- end -->\n", "no <!-- end -->"),
    ],
)
def test_wrong_marks_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        filled(text, Path("page.md"))


def test_the_worst_model_of_a_shared_check_is_shown():
    text = TABLES["kernels: figures"]()
    assert "(worst of 5: qwen3) | 1.043 | ≤ 1 | missed" in text
    assert text.count("worst of") == 4


def test_the_summary_links_every_page_and_shows_missed_targets():
    rows = re.findall(r"^\| \[.+?\]\((.+?)\) \| (.+) \| (.+) \|$", TABLES["summary"](), flags=re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs" / "benchmarks").glob("*.md")} - {"index.md"}
    assert {page for page, *_ in rows} == pages
    for page, best, worst in rows:
        missed = "| missed |" in (ROOT / "docs" / "benchmarks" / page).read_text()
        assert "reached" in best and ("missed" in worst or not missed), page


def test_the_readme_names_the_peer_that_its_ratio_is_to():
    rows = {row["system"]: row for row in json.loads((RESULTS / "zero-cpu.json").read_text())["rows"]}
    ratio = rows["dsgraph-3"]["peak_mb"] / rows["fsdp2-split-compile"]["peak_mb"]
    assert (
        f"| peak memory of a rank | {ratio:.2f} | FSDP2, embedding and head as groups, compiled |"
        in TABLES["results"]()
    )

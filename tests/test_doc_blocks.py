"""Each block of code in README, getting-started and guides runs as it stands, and prints what the page shows."""

from __future__ import annotations

import pytest

from tests.doc_blocks import ROOT, _shows, blocks_of, run_page

STARTED = ROOT / "docs" / "getting-started"
FIRST = [ROOT / "README.md", *sorted(STARTED.glob("*.md"))]
# Its program is that of first-dump.md, as a test below makes sure.
FIRST.remove(STARTED / "first-run.md")
_NAMES = ("reference/dumps-and-reports.md", "concepts/index.md", "concepts/verifier.md")
OTHERS = [ROOT / "docs" / name for name in _NAMES]
GUIDES = [STARTED / "first-run.md", *sorted((ROOT / "docs" / "guides").glob("*.md")), *OTHERS]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "page", [*FIRST, *(pytest.param(page, marks=pytest.mark.full) for page in GUIDES)], ids=lambda page: page.stem
)
def test_blocks_of_a_page_run(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", [*FIRST, *GUIDES], ids=lambda page: page.stem)
def test_each_block_is_of_a_kind_that_is_run_or_shown(page):
    """A fence without a language, or an indented one, would be left out in silence."""
    text = page.read_text()
    blocks = [block for block in blocks_of(text) if not block.hidden]
    assert {block.kind for block in blocks} <= {"python", "sh", "text", "json", "yaml", "diff"}
    assert text.count("```") == 2 * len(blocks)


def test_output_is_compared_without_its_numbers():
    assert _shows("step 1: 0.25 s\n...\ndone\n", "step 7: 12.5 s\nanything\nat all\ndone\n")
    assert _shows("torch 2.13.0+cpu\n-----  --\n", "torch 2.15.0+cu132\n------  --\n")
    assert not _shows("step 1: 0.25 s\n", "pass 1: 0.25 s\n")
    assert not _shows("one\n", "one\ntwo\n")


def test_a_block_that_fails_names_its_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('```python title="a.py"\nprint(1 / 0)\n```\n\n```sh\npython a.py\n```\n')
    with pytest.raises(AssertionError, match=r"page\.md: python a\.py"):
        run_page(page, tmp_path)


@pytest.mark.full
@pytest.mark.distributed
def test_each_marker_of_ranks_begins_a_program(tmp_path):
    page = tmp_path / "page.md"
    code = (
        '```python\nimport os\nassert "seen" not in globals() and os.environ["WORLD_SIZE"] == "{0}"\nseen = {0}\n```\n'
    )
    page.write_text("\n".join(f"<!-- ranks: {ranks} -->\n{code.format(ranks)}" for ranks in (2, 1)))
    run_page(page, tmp_path)
    page.write_text(f"<!-- ranks: 2 -->\n{code.format(2)}\n<!-- ranks: 1 -->\n{code.format(2)}")
    with pytest.raises(AssertionError, match=r"page\.md: torchrun --nproc-per-node 1"):
        run_page(page, tmp_path)


def test_the_first_dump_is_of_the_program_of_the_first_run():
    run, dump = (blocks_of((STARTED / page).read_text())[0] for page in ("first-run.md", "first-dump.md"))
    assert run.title == dump.title == "train.py"
    assert run.code == dump.code

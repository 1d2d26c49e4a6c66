"""README and docs are true: links lead somewhere, options and passes are those that there are."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsgraph
from dsgraph.compiler.options import BackendOptions
from dsgraph.passes.kernels.registry import KERNELS
from dsgraph.passes.parallel.lower_slices import LowerForwardSlices
from tests.doc_blocks import blocks_of

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "trials" / "README.md"])
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _without_listings(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _without_listings(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for path, anchor in _LINK.findall(_without_listings(page.read_text())):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in _anchors(target), f"{page.name} links to {path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    """`passes/ir/graph.py`, and `passes/ir/` of a folder; names with <brackets> are patterns."""
    for path in re.findall(
        r"`((?:dsgraph|passes|inductor_ext|tests|examples|benchmarks|docs)/[\w/.]*)`", page.read_text()
    ):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_every_option_of_the_backend_is_described_in_order():
    assert list(_rows("Options of the backend")) == list(BackendOptions.model_fields)


@pytest.mark.parametrize(
    "name", ["verify", "strict", "recompile_limit", "dump_compiles", "inductor", "codegen", "kernels"]
)
def test_defaults_of_options_are_those_of_the_page(name):
    default = BackendOptions.model_fields[name].get_default(call_default_factory=True)
    assert _rows("Options of the backend")[name] == f"`{default!r}`".replace("'", '"')


@pytest.mark.parametrize(
    ("function", "first"), [(dsgraph.partition, 1), (dsgraph.materialize, 1), (dsgraph.accumulate, 1)]
)
def test_every_argument_is_described(function, first):
    arguments = list(inspect.signature(function).parameters)[first:]
    assert list(_rows(f"`dsgraph.{function.__name__}(")) == arguments


def test_every_kernel_is_named():
    text = (ROOT / "docs" / "reference" / "options.md").read_text()
    assert not [spec.name for spec in KERNELS if f"`{spec.name}`" not in text]


def test_a_listed_dump_has_the_default_passes():
    text = (ROOT / "docs" / "reference" / "dumps-and-reports.md").read_text()
    dumps = text[text.index("## Dumps") :].partition("\n## ")[0]
    listed = re.findall(r"^[a-z]+-[1-9]\d*-(\w+) ", dumps, flags=re.MULTILINE)
    not_sliced = [item for item in dsgraph.default_pipeline() if not isinstance(item, LowerForwardSlices)]
    assert listed == [item.name for item in not_sliced]


def test_every_public_name_is_in_the_api_reference_or_among_the_errors():
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    errors = {name for name in dsgraph.__all__ if name.endswith("Error")}
    assert set(re.findall(r"^::: dsgraph\.(\w+)", text, flags=re.MULTILINE)) == set(dsgraph.__all__) - errors
    listed = text[: text.index("## Partition a model")]
    assert not [name for name in set(dsgraph.__all__) - errors if f"`{name}`" not in listed]


def test_every_error_class_is_described():
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \((`dsgraph`, )?", (ROOT / "docs" / "reference" / "errors.md").read_text(), flags=re.MULTILINE
        )
    )
    assert set(rows) == set(_exception_classes())
    assert {name for name, public in rows.items() if public} == {
        name for name in dsgraph.__all__ if name.endswith("Error")
    }


def test_every_environment_variable_is_described():
    described = set(re.findall(r"^\| `(DSGRAPH_\w+)` \|", _page("environment"), flags=re.MULTILINE))
    texts = [path.read_text() for path in (*_sources(), *(ROOT / "tests" / "gpu").rglob("*.py"), ROOT / "Makefile")]
    assert described == {name for text in texts for name in re.findall(r"\bDSGRAPH_[A-Z_]+\b", text)}


def test_messages_of_the_page_of_limits_are_those_of_the_sources():
    """Compare runs of four words that contain no value: most of them must occur in one text of the sources."""
    texts = "\n".join(_texts())
    stale = []
    for error in re.findall(r"^\| .+? \| (.+?) \| [^|]+ \|$", _page("limits"), flags=re.MULTILINE):
        quoted = re.match(r'`([^`]+)`|"([^"]+)"', error)
        message = (quoted[1] or quoted[2]) if quoted else ""
        runs = [run for part in _VALUE.split(message) for run in _runs(part.split())]
        if runs and sum(run in texts for run in runs) < len(runs) / 2:
            stale.append(message)
    assert [message for message in stale if not message.startswith("ranks 0 and 1 would")] == []


_VALUE = re.compile(r"'[^']*'|\d+|\.\.\.|\([^)]*\)|\[[^\]]*\]|\b\w*[A-Z_=]\w*\b|[:;,.]")


def _runs(words: list[str]) -> list[str]:
    return [" ".join(words[first : first + 4]) for first in range(max(1, len(words) - 3)) if len(words) > 1]


def _page(name: str) -> str:
    return (ROOT / "docs" / "reference" / f"{name}.md").read_text()


def _texts() -> Iterator[str]:
    """Yield the strings of the sources with single spaces; a value in an f-string is a bracket."""
    for node in (node for path in _sources() for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "[]" for part in node.values)
            yield " ".join("".join(map(str, parts)).split())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


def _sources() -> list[Path]:
    return [path for folder in ("dsgraph", "passes", "inductor_ext") for path in (ROOT / folder).rglob("*.py")]


def _exception_classes() -> list[str]:
    """Names of the public classes that derive from an exception, over all sources."""
    defined = [node for path in _sources() for node in ast.walk(ast.parse(path.read_text()))]
    return [
        node.name
        for node in defined
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and any(isinstance(base, ast.Name) and base.id.endswith(("Error", "Exception")) for base in node.bases)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_script_for_nccl_chooses_its_device(page):
    """Without it every rank takes the first GPU, and a model on the CPU has no NCCL; a page may link to the lines."""
    text = page.read_text()
    shown = [block.code for block in blocks_of(text) if block.kind == "python" and not block.hidden]
    explained = "gpus.md#a-script-on-gpus" in text or ("set_device(" in text and ".cuda()" in text)
    assert explained or not [code for code in shown if '"nccl"' in code]


def test_the_script_on_gpus_chooses_its_device_and_moves_the_model():
    _, _, section = _page("gpus").partition("## A script on GPUs")
    (script, *_) = [block.code for block in blocks_of(section)]
    assert script.index("set_device(") < script.index('init_process_group("nccl")') < script.index(".cuda()")


def test_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def _rows(heading: str) -> dict[str, str]:
    """First and second column of the table under a heading of docs/reference/options.md."""
    text = (ROOT / "docs" / "reference" / "options.md").read_text()
    section = text[text.index(f"## {heading}") :].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, flags=re.MULTILINE))

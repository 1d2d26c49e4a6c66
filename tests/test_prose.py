"""Texts of the code: docstrings begin plainly, times are "before" and "after", and errors name a remedy."""

from __future__ import annotations

import ast
import inspect
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("dsgraph", "passes", "inductor_ext")
FILES = [
    path for folder in (*PRODUCT, "benchmarks", "examples", "tests") for path in sorted((ROOT / folder).rglob("*.py"))
]

# First words that leave open what a docstring is about: "What a rank holds" is "The parameters that a rank holds".
RIDDLES = {"What", "Whether", "Of", "Likewise", "Behind", "Amid"}

# Both are places: "behind the wall", "ahead of the car". Of times, write "after", "before", "during".
_PLACES = re.compile(r"\b(behind|ahead\s+of|amid)\b", re.IGNORECASE)

# File: texts in which they are places, and why.
ALLOWED = {
    "dsgraph/tools/cli/inspect/collectives.py": {
        "in the queue behind other collectives": "a place in a queue",
    },
    "dsgraph/tools/cli/inspect/timeline.py": {"behind: The nodes": "the name of an attribute"},
}


def _files() -> Iterator[tuple[str, str]]:
    linked = (ROOT / "dsgraph" / "passes", ROOT / "dsgraph" / "inductor_ext")
    for path in FILES:
        if path != Path(__file__).resolve() and not set(linked) & set(path.parents):
            yield str(path.relative_to(ROOT)), path.read_text()


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, and of each string after a field or a constant."""
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:
        body = [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.stmt)]
        nodes += body  # statements alone: expressions hold none
        for before, item in zip([None, *body], body, strict=False):
            is_text = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
            if is_text and isinstance(item.value.value, str):
                starts = before is None and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                if starts or isinstance(before, ast.Assign | ast.AnnAssign):
                    yield item.lineno, item.value.value


def places(source: str, allowed: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings, comments and other strings that say "behind", "ahead of" or "amid"."""
    if not _PLACES.search(source):  # quick
        return
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type in kinds:
            text = " ".join(token.string.split())
            for known in allowed:
                text = text.replace(known, "")
            if _PLACES.search(text):
                yield token.start[0], text


def names_no_remedy(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each public error class whose docstring has no paragraph "Fix: ...".

    A class is an error if the name of a base ends in "Error", or is "Exception".
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = [ast.unparse(base) for base in node.bases]
            is_error = any(base.endswith(("Error", "Exception")) for base in bases)
            paragraphs = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")
            if is_error and not any(paragraph.startswith("Fix: ") for paragraph in paragraphs):
                yield node.lineno, node.name


def test_docstrings_begin_with_a_noun_or_an_imperative():
    found = [
        f"{file}:{line}: {text.strip().splitlines()[0]}"
        for file, source in _files()
        for line, text in docstrings(source)
        if (text.split() or [""])[0].rstrip(",:") in RIDDLES
    ]
    assert not found, "rewrite (functions: an imperative, others: a noun phrase):\n" + "\n".join(found)


def test_times_are_before_and_after():
    found = [
        f"{file}:{line}: {text}" for file, source in _files() for line, text in places(source, ALLOWED.get(file, {}))
    ]
    assert not found, "write `before`, `after` or `during`:\n" + "\n".join(found)


def test_texts_that_are_allowed_exist():
    for file, texts in ALLOWED.items():
        joined = " ".join((ROOT / file).read_text().split())
        assert not [text for text in texts if text not in joined], (
            f"{file} lacks an allowed text: remove it from ALLOWED"
        )


def test_errors_name_a_remedy():
    found = [
        f"{file}:{line}: {name}"
        for file, source in _files()
        if file.startswith(PRODUCT)
        for line, name in names_no_remedy(source)
    ]
    assert not found, 'add a paragraph "Fix: ..." to the docstring:\n' + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""What it is."""',
        'def f():\n    """Whether it is."""',
        'class C:\n    """A class."""\n\n    x: int\n    """Of a rank."""',
        'X = 1\n"""Likewise."""',
    ],
)
def test_docstrings_are_found(source):
    texts = [text.split()[0].rstrip(".") for _, text in docstrings(source)]
    assert set(texts) & RIDDLES


@pytest.mark.parametrize("source", ["x = 1  # behind it\n", 'x = "ahead  of it"\n', 'x = f"{1} amid it"\n'])
def test_places_are_found(source):
    assert list(places(source, {}))
    assert not list(places(source.replace("behind", "after").replace("ahead", "part").replace("amid", "in"), {}))


def test_an_error_without_a_remedy_is_found():
    assert [*names_no_remedy('class E(ValueError):\n    """An error."""\n')] == [(1, "E")]
    assert not [*names_no_remedy('class E(ValueError):\n    """An error.\n\n    Fix: change it.\n    """\n')]

"""Each kind of thing that users can name has one table: nothing else lists the names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

import dsgraph
from dsgraph.compiler.build_pipeline import built_in_passes
from dsgraph.optim.registry import OPTIMIZERS
from dsgraph.passes import KERNELS
from dsgraph.passes.ir.collectives import TABLE
from dsgraph.tools.cli.main import COMMANDS
from tests.test_layering import FLOORS, ROOT, _files, _tree


class Table(NamedTuple):
    """A table of names.

    Attributes:
        file: Where it stands.
        names: What it lists.
        words: True if the names are also ordinary words: then only lists of three or more of them are second tables.
            Else two make a list, and no name may be spelled out as a string.
    """

    file: str
    names: frozenset[str]
    words: bool = False


@cache
def _tables() -> dict[str, Table]:
    passes = {name for kind in built_in_passes() for name in (kind.__name__, kind().name)}
    optimizers = {name for key, entry in OPTIMIZERS.items() for name in (key, entry.name)}
    return {
        "pass": Table("dsgraph/compiler/build_pipeline.py", frozenset(passes)),
        "optimizer": Table("dsgraph/optim/registry.py", frozenset(optimizers)),
        "public name": Table("dsgraph/__init__.pyi", frozenset(dsgraph.__all__), words=True),
        "command": Table("dsgraph/tools/cli/main.py", frozenset(COMMANDS), words=True),
        "kernel": Table("passes/kernels/registry.py", frozenset(spec.name for spec in KERNELS), words=True),
        "collective": Table("passes/ir/collectives.py", frozenset(TABLE.by_kind), words=True),
    }


# Lists and strings that are no second table, with the reason.
ALLOWED = {
    ("pass", "dsgraph/engine/activation_checkpointing.py"): "the key of the configuration, of the same name",
    ("optimizer", "dsgraph/optim/hooks.py"): "classes of torch, which no registry lists",
    ("optimizer", "dsgraph/optim/host_optimizer.py"): "classes of torch that have a fused step",
    ("optimizer", "dsgraph/utils/nearest.py"): "what the names of other libraries mean",
    ("public name", "passes/__init__.py"): "what the compiler offers to the product",
    (
        "collective",
        "passes/zero/choose_collective_algorithms.py",
    ): "the forms of a reduction to choose from",
}


KINDS = ("pass", "optimizer", "public name", "command", "kernel", "collective")


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_listed_in_their_table_alone(kind):
    assert len(_tables()[kind].names) > 4
    for path, names in _second_tables(kind):
        assert (kind, path) in ALLOWED, f"{path} lists {names}, as {_tables()[kind].file} does: ask that one"


def test_every_exception_is_needed():
    assert ALLOWED.keys() <= {(kind, path) for kind in KINDS for path, _ in _second_tables(kind)}


def test_a_second_table_is_found():
    tree = ast.parse("x = [MergeGathers(), dsgraph.passes.AwaitCopies(size=1)]\ny = {'Adam': 1, 'Lamb': 2}\n")
    assert list(_listed(tree)) == [
        {"MergeGathers", "dsgraph", "passes", "AwaitCopies"},
        {"Adam", "Lamb"},
    ]


def _second_tables(kind: str) -> Iterator[tuple[str, list[str]]]:
    """Files that list names of a kind outside their table, or spell one out, with the names."""
    table = _tables()[kind]
    for path, lists, strings in _files_read():
        if path == table.file:
            continue
        for names in lists:
            found = {name.lower(): name for name in sorted(names & table.names)}
            if len(found) >= (3 if table.words else 2):
                yield path, sorted(found.values())
        if not table.words and strings & table.names:
            yield path, sorted(strings & table.names)


@cache
def _files_read() -> list[tuple[str, list[set[str]], set[str]]]:
    """Each file of the product with its lists of names, and all its strings but docstrings."""
    trees = [(path, _tree(path)) for floor in FLOORS for path in _files(floor)]
    return [(str(path.relative_to(ROOT)), list(_listed(tree)), _strings(tree)) for path, tree in trees]


def _strings(tree: ast.AST) -> set[str]:
    parents = [node for node in ast.walk(tree) if not isinstance(node, ast.Expr)]
    nodes = [node for parent in parents for node in ast.iter_child_nodes(parent) if isinstance(node, ast.Constant)]
    return {node.value for node in nodes if isinstance(node.value, str)}


def _listed(tree: ast.AST) -> Iterator[set[str]]:
    """The names in each list, tuple, set, and in the keys of each dict."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            yield {name for member in node.elts for name in _names(member)}
        elif isinstance(node, ast.Dict):
            yield {name for key in node.keys if key is not None for name in _names(key)}


def _names(node: ast.AST) -> list[str]:
    """The names that a member of a list spells: of a string, a name, an attribute, or of what it calls."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            return [*_names(value), name]
        case ast.Call(func=called):
            return _names(called)
        case ast.Starred(value=value):
            return _names(value)
    return []

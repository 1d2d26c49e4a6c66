"""Imports point down only; passes do not know each other; private torch APIs stand in one file a floor."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"inductor_ext": 0, "passes": 1, "dsgraph": 2}
# What passes share: everything in their folder that is not a pass.
SHARED = {
    *("base", "collective_order", "compat", "errors", "graph", "notes", "op_traits", "partitioner", "pipeline"),
    *("__init__", "cost", "fusion", "hardware", "memory", "mesh_axis", "runner", "schedule", "step_memory"),
    *("invariants", "invariants_collectives", "invariants_memory", "invariants_reductions", "invariants_replicas"),
    *("buckets", "capture_graph", "coalesced", "gathers", "knapsack", "reductions", "sources"),
}
# What makes code for a device that is not there, with the versions on which it was checked: `harness.CHECKED`.
EMISSION = [ROOT / "dsgraph" / "emission" / f"{stem}.py" for stem in ("harness", "lowering", "schedule")]


def _files(floor: str) -> list[Path]:
    linked = {ROOT / "dsgraph" / "passes", ROOT / "dsgraph" / "inductor_ext"}
    return [p for p in sorted((ROOT / floor).rglob("*.py")) if not linked & set(p.parents)]


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports, relative imports resolved."""
    floor = path.relative_to(ROOT).parts[0]
    package = ["dsgraph"] if floor == "dsgraph" else ["dsgraph", floor]
    package += list(path.relative_to(ROOT / floor).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _floor_of(name: str) -> int | None:
    parts = name.split(".")
    if parts[0] != "dsgraph":
        return None
    return FLOORS.get(parts[1], 2) if len(parts) > 1 else 2


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_point_down(floor):
    for path in _files(floor):
        for name in _imports(path):
            target = _floor_of(name)
            assert target is None or target <= FLOORS[floor], f"{path.relative_to(ROOT)} imports {name}, a floor above"


@pytest.mark.parametrize("floor", FLOORS)
def test_bare_names_are_not_imported(floor):
    for path in _files(floor):
        for name in _imports(path):
            assert name.split(".")[0] not in ("passes", "inductor_ext"), f"{path.relative_to(ROOT)} imports {name}"


def test_passes_do_not_import_one_another():
    for path in _files("passes"):
        if path.stem in SHARED:
            continue
        for name in _imports(path):
            match = re.fullmatch(r"dsgraph\.passes\.(\w+)(\..*)?", name)
            assert not match or match[1] in SHARED, f"pass {path.stem} imports {name}"


@pytest.mark.parametrize("floor", FLOORS)
def test_private_torch_apis_stand_in_compat(floor):
    for path in _files(floor):
        if path.name == "compat.py" or path in EMISSION:
            continue
        for name in (*_imports(path), *_attributes(path)):
            parts = name.split(".")
            if parts[0] == "torch":
                private = [part for part in parts if re.fullmatch(r"_[a-zA-Z].*", part)]
                assert not private, f"{path.relative_to(ROOT)} uses {name}: move it to compat.py"


def _attributes(path: Path) -> Iterator[str]:
    """Dotted names that a file reads off the `torch` module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_the_links_stand():
    for name in ("passes", "inductor_ext"):
        link = ROOT / "dsgraph" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name


def test_every_pass_has_a_test_of_its_name():
    for path in _files("passes"):
        if path.stem not in SHARED:
            assert (ROOT / "tests" / "passes" / f"test_{path.stem}.py").is_file(), path.stem

"""Imports point down only, between floors and between the folders of a floor; private torch APIs stand in compat."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import networkx as nx
import pytest

from dsgraph.compiler.build_pipeline import built_in_passes
from dsgraph.passes import GraphPass, Phase

ROOT = Path(__file__).resolve().parent.parent
# The folders of each floor, lowest first; those of one row know nothing of each other. A file that stands in no folder
# counts as its own name here, so that each has its place.
ORDER = {
    "inductor_ext": [
        ["compat"],
        ["ops", "symbolic_sizes"],
        ["kernels"],
        ["quant"],
        ["collectives", "transfers", "sparse"],
        ["__init__"],
    ],
    "passes": [
        ["compat", "errors"],
        ["ir"],
        ["analysis"],
        ["core"],
        ["verify", "zero", "overlap", "memory", "kernels"],
        ["parallel"],
        ["runner"],
        ["__init__"],
    ],
    "dsgraph": [
        ["compat", "utils", "batches"],
        ["offload"],
        ["ranks"],
        ["partitioning"],
        ["optim"],
        ["compiler"],
        ["checkpoint"],
        ["parallel", "launch"],
        ["inference"],
        ["engine"],
        ["sparse", "ops"],
        ["tools", "checkpointing", "nn"],
        ["api"],
        ["__init__", "__main__"],
    ],
}
FLOORS = {floor: number for number, floor in enumerate(ORDER)}
# What makes code for a device that is not there, with the versions on which it was checked: `harness.CHECKED`.
EMISSION = [
    ROOT / "dsgraph" / "tools" / "emission" / f"{stem}.py" for stem in ("harness", "lowering", "scheduled_kernels")
]
# Names that every part may ask the product for.
FREE = {"dsgraph.__version__"}
# Names of others that begin with an underscore and may be read outside compat.
KNOWN = {
    "_asdict": "documented: every named tuple has it",
    "_getframe": "documented, in `sys`",
    "_actions": "argparse offers no other list of a parser's arguments; docs/reference/cli.md alone is made of it",
    "_print": "documented: how a printer of sympy's prints a part of what it prints",
    "_init_weights": "the hook by which transformers initialises a model",
    "_dsgraph": "the product's own, which it sets on modules",
    # What a module is made of. Each is a plain dict or list; the product's shards stand in them.
    **dict.fromkeys(("_buffers", "_non_persistent_buffers_set", "_flat_weights_names"), "as `_parameters`"),
    "_parameters": "torch's own functions for parallel training replace parameters in it",
}


def _files(floor: str) -> list[Path]:
    linked = {ROOT / "dsgraph" / "passes", ROOT / "dsgraph" / "inductor_ext"}
    return [p for p in sorted((ROOT / floor).rglob("*.py")) if not linked & set(p.parents)]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _modules() -> dict[str, Path]:
    """Every module of the three floors, by its absolute name."""
    found = {}
    for floor in FLOORS:
        for path in _files(floor):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if floor == "dsgraph" else ("dsgraph", *parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports, relative imports resolved, whenever it does so."""
    floor = path.relative_to(ROOT).parts[0]
    package = ["dsgraph"] if floor == "dsgraph" else ["dsgraph", floor]
    package += list(path.relative_to(ROOT / floor).parts[:-1])
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _imported_modules(path: Path) -> set[str]:
    """The modules of this project that a file imports, or imports names of."""
    found = set()
    for name in _imports(path):
        if name in FREE:
            continue
        module = name if name in _modules() else name.rpartition(".")[0]
        if module in _modules() and _modules()[module] != path:
            found.add(module)
    return found


def _place(path: Path) -> tuple[str, str]:
    """Floor and folder of a file."""
    floor, *parts = path.relative_to(ROOT).with_suffix("").parts
    return floor, parts[0]


def _level(place: tuple[str, str]) -> tuple[int, int]:
    floor, folder = place
    (level,) = [number for number, row in enumerate(ORDER[floor]) if folder in row] or [None]
    assert level is not None, f"{floor}/{folder} has no place in ORDER: say here what it stands on"
    return FLOORS[floor], level


@pytest.mark.parametrize("floor", list(FLOORS))
def test_imports_point_down(floor):
    for path in _files(floor):
        here = _place(path)
        for module in sorted(_imported_modules(path)):
            there = _place(_modules()[module])
            if there == here:
                continue
            # From outside, a floor is what its face offers and what its folders hold.
            below = FLOORS[there[0]] < FLOORS[here[0]] or _level(there) < _level(here)
            assert below, f"{path.relative_to(ROOT)} imports {module}, which does not stand below it"


def test_no_circles_of_files():
    graph = nx.DiGraph()
    for name, path in _modules().items():
        graph.add_edges_from((name, other) for other in _imported_modules(path))
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert not circles, f"files that import each other: {circles}"


def test_no_function_hides_a_module():
    for name, path in _modules().items():
        if path.name != "__init__.py":
            continue
        offered = {name.rpartition(".")[2] for name in _imports(path)}
        offered |= {node.name for node in _tree(path).body if isinstance(node, ast.FunctionDef)}
        own = {module.rpartition(".")[2] for module in _modules() if module.rpartition(".")[0] == name}
        modules = {each.rpartition(".")[2] for each in _imported_modules(path) if each.rpartition(".")[0] == name}
        assert not (offered & own) - modules, f"{path.relative_to(ROOT)} hides modules: {offered & own}"


@pytest.mark.parametrize("floor", list(FLOORS))
def test_bare_names_are_not_imported(floor):
    for path in _files(floor):
        for name in _imports(path):
            assert name.split(".")[0] not in ("passes", "inductor_ext"), f"{path.relative_to(ROOT)} imports {name}"


def _defines_passes(path: Path) -> list[str]:
    """The names of the built-in passes that a file defines."""
    known = {kind.__name__ for kind in built_in_passes()}
    return [node.name for node in _tree(path).body if isinstance(node, ast.ClassDef) and node.name in known]


def test_every_pass_is_in_the_list_of_passes():
    for name in _modules():
        if name.startswith("dsgraph.passes."):
            import_module(name)
    kinds = [kind for kind in _subclasses(GraphPass) if kind.__module__.startswith("dsgraph.passes.")]
    passes = {kind for kind in kinds if isinstance(getattr(kind, "phase", None), Phase)}
    assert passes == set(built_in_passes())


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield from (each, *_subclasses(each))


def test_passes_do_not_import_one_another():
    passes = {name for name, path in _modules().items() if path.parts[-3] == "passes" and _defines_passes(path)}
    assert len(passes) > 10
    for name in passes:
        assert not _imported_modules(_modules()[name]) & passes, f"pass {name} imports another"


def test_every_pass_has_a_test_of_its_name():
    for name, path in _modules().items():
        if _defines_passes(path):
            folder, stem = name.split(".")[-2:]
            assert (ROOT / "tests" / "passes" / folder / f"test_{stem}.py").is_file(), name


@pytest.mark.parametrize("floor", list(FLOORS))
def test_private_torch_apis_stand_in_compat(floor):
    for path in _files(floor):
        if _place(path)[1] == "compat" or path in EMISSION:
            continue
        for name in (*_imports(path), *_attributes(path)):
            parts = name.split(".")
            if parts[0] == "torch":
                private = [part for part in parts if re.fullmatch(r"_[a-zA-Z].*", part)]
                assert not private, f"{path.relative_to(ROOT)} uses {name}: move it to compat"


@pytest.mark.parametrize("floor", list(FLOORS))
def test_private_attributes_of_others_are_read_in_compat(floor):
    for path in _files(floor):
        if _place(path)[1] == "compat" or path in EMISSION:
            continue
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-zA-Z].*", node.attr):
                is_op = ast.unparse(node.value).split(".")[-1] == "aten"
                known = is_op or node.attr in KNOWN or node.attr in _private_members()
                assert known, f"{path.relative_to(ROOT)} reads {ast.unparse(node)}: move it to compat"


def test_every_known_private_name_is_read():
    read = {name.rpartition(".")[2] for floor in FLOORS for path in _files(floor) for name in _attributes(path)}
    assert not set(KNOWN) - read


@cache
def _private_members() -> set[str]:
    """Return the members of this project's classes whose names begin with an underscore."""
    found = set()
    for path in _modules().values():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                found |= {name for item in node.body for name in _bound(item)}
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return found - set(KNOWN)


def _bound(item: ast.stmt) -> Iterator[str]:
    """The names that a statement in the body of a class gives a value or a type."""
    if isinstance(item, (ast.FunctionDef, ast.ClassDef)):
        yield item.name
    elif isinstance(item, (ast.Assign, ast.AnnAssign)):
        targets = item.targets if isinstance(item, ast.Assign) else [item.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _attributes(path: Path) -> Iterator[str]:
    """Dotted names that a file reads off the `torch` module."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_the_links_stand():
    for name in ("passes", "inductor_ext"):
        link = ROOT / "dsgraph" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name


# Files over 300 lines and functions over 50, with the reason; the numbers may shrink, not grow.
LONG_FILES = {
    "dsgraph/compiler/backend.py": (320, "one compile, from the captured graph to its wrappers"),
    "dsgraph/partitioning/step/step_run.py": (450, "the one run-time of a step, forward and backward, compiled or not"),
    "dsgraph/inference/engine.py": (330, "the public methods of the engine, with their documentation"),
    "dsgraph/offload/stored_rows.py": (320, "one tensor subclass"),
    "dsgraph/tools/dumping/records.py": (330, "the format of a dump"),
}
LONG_FUNCTIONS = {
    ("dsgraph/engine/initialize.py", "initialize"): (76, "public: documentation of its arguments"),
    ("dsgraph/checkpoint/save.py", "save"): (52, "documentation of its arguments"),
    ("dsgraph/engine/optimizers/offloading.py", "planned"): (62, "documentation of its arguments"),
    ("dsgraph/inference/init_inference.py", "init_inference"): (54, "public: documentation of its arguments"),
    ("dsgraph/inference/quantization/quantize.py", "quantize"): (52, "public: documentation of its arguments"),
    ("dsgraph/optim/plan_offload.py", "plan_offload"): (68, "documentation of its arguments"),
    ("dsgraph/parallel/parallelize.py", "parallelize"): (74, "public: documentation of its arguments"),
    ("dsgraph/parallel/pipeline/pipeline.py", "pipeline"): (124, "public: documentation of its arguments"),
    ("dsgraph/partitioning/initialization/materialize.py", "materialize"): (70, "public: documentation"),
    ("dsgraph/partitioning/partition.py", "partition"): (80, "public: documentation of its arguments"),
    ("dsgraph/partitioning/seam.py", "property_for"): (60, "the one property, whose branches belong together"),
    ("passes/analysis/pair_memory.py", "pair_memory"): (62, "documentation of its arguments"),
    ("passes/memory/fit.py", "fit"): (54, "documentation of its arguments"),
}


def test_rooms_have_at_most_20_files():
    sizes = Counter(str(path.parent.relative_to(ROOT)) for floor in FLOORS for path in _files(floor))
    for room, size in sizes.items():
        assert size <= 20, f"{room} has {size} files: make a room of those that belong together"


def test_files_have_at_most_300_lines():
    for floor in FLOORS:
        for path in _files(floor):
            most, _ = LONG_FILES.get(str(path.relative_to(ROOT)), (300, ""))
            assert len(path.read_text().splitlines()) <= most, f"{path.relative_to(ROOT)} has over {most} lines"
    assert all((ROOT / name).is_file() for name in LONG_FILES)


def test_functions_have_at_most_50_lines():
    found = set()
    for floor in FLOORS:
        for path in _files(floor):
            for node in ast.walk(_tree(path)):
                if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.end_lineno is None:
                    continue
                here = str(path.relative_to(ROOT)), node.name
                most, _ = LONG_FUNCTIONS.get(here, (50, ""))
                size = node.end_lineno - node.lineno + 1
                assert size <= most, f"{node.name} of {here[0]} has {size} lines, over {most}"
                found.add(here)
    assert LONG_FUNCTIONS.keys() <= found

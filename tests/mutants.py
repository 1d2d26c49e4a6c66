"""Are the tests sharp? Breaks the product in one place at a time, and sees whether they notice.

    python -m tests.mutants                     every mutant against the tests that should kill it
    python -m tests.mutants --only NAME ...     some of them
    python -m tests.mutants --table FILE.md     writes the table of tests/mutants.md into the file as well

A mutant is killed by the first tests that fail. `killers` are tried first; what survives them meets all of `make test`,
and what survives that all of `make test-all`. A mutant that only the latter kills is a fault of the small tier. A
mutant that does not even import proves nothing and counts as an error.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

from tests.mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
SMALL, FULL = "not gpu and not full", "not gpu"
MARK = ("<!-- mutants -->", "<!-- /mutants -->")
_FAILED, _NO_TESTS = 1, 5
_CLOSING = (r"\)", r"\]", r"\}")  # a formatter may put a comma before these


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutant.

    Attributes:
        mutant: The mutant.
        tier: "small", "full", "survived", or "error" if nothing ran.
        killer: The first test that failed, or the error.
        seconds: How long that took.
    """

    mutant: Mutant
    tier: str
    killer: str
    seconds: float


def apply(root: Path, mutant: Mutant) -> str:
    """Writes the mutant into the tree at `root`; returns what stood in the file before.

    Raises:
        ValueError: What it changes does not stand exactly once in the function that it names.
    """
    path = root / mutant.file
    text = path.read_text()
    places = [
        (begin + match.start(), begin + match.end())
        for begin, end in _spans(text, mutant.within)
        for match in _pattern(mutant.before).finditer(text[begin:end])
    ]
    if len(places) != 1:
        raise ValueError(
            f"mutant {mutant.name}: {mutant.before!r} stands {len(places)} times in {mutant.within} of {path}"
        )
    ((begin, end),) = places
    path.write_text(f"{text[:begin]}{mutant.after}{text[end:]}")
    return text


def _spans(text: str, within: str) -> list[tuple[int, int]]:
    """Where the source of a function, class, attribute or constant begins and ends: `Class.method`, `CONSTANT`."""
    found: list[ast.AST] = [ast.parse(text)]
    for name in within.split("."):
        found = [node for parent in found for node in _statements(parent) if name in _names(node)]
    starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]
    spans = []
    for node in found:
        assert isinstance(node, ast.stmt) and node.end_lineno is not None
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        spans.append((starts[first - 1], starts[node.end_lineno]))
    return spans


def _statements(parent: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a body, also below `if` and the like, but not those of functions and classes in it."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.stmt):
            yield node
        if not _names(node):
            yield from _statements(node)


def _names(node: ast.AST) -> list[str]:
    """Return the names that a definition or an assignment defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [ast.unparse(target) for target in targets]


def _pattern(before: str) -> re.Pattern[str]:
    """Finds code however it is formatted: its words and signs, with any space and trailing commas between them."""
    first, *others = (rf"\b{word}\b" if word else re.escape(sign) for word, sign in re.findall(r"(\w+)|(\S)", before))
    return re.compile(first + "".join(rf"\s*(?:,\s*)?{part}" if part in _CLOSING else rf"\s*{part}" for part in others))


def judge(root: Path, mutant: Mutant, *, everything: bool) -> Outcome:
    """Runs tests against one mutant in the tree at `root`, and takes it out again."""
    started = time.monotonic()
    text = apply(root, mutant)
    try:
        rounds = [("small", SMALL, mutant.killers)]
        if everything:
            rounds += [("small", SMALL, ()), ("full", FULL, ())]
        for tier, marker, paths in rounds:
            code, output = _pytest(root, marker, paths)
            if code == _FAILED:
                return Outcome(mutant, tier, _first_failure(output), time.monotonic() - started)
            if code not in (0, _NO_TESTS):
                return Outcome(mutant, "error", output[-2000:], time.monotonic() - started)
        return Outcome(mutant, "survived", "", time.monotonic() - started)
    finally:
        (root / mutant.file).write_text(text)


def _pytest(root: Path, marker: str, paths: Sequence[str]) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as caches:  # what a mutant compiled must not be found by the next
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": caches,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marker, *paths]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def _first_failure(output: str) -> str:
    match = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return match[1] if match else "?"


def _copies(count: int, folder: Path) -> Iterator[Path]:
    """Copies of the files that git knows, to be broken."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
    for number in range(count):
        root = folder / f"copy{number}"
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
        yield root


def run(mutants: Sequence[Mutant], *, jobs: int, everything: bool) -> list[Outcome]:
    """Judges mutants, several at a time, each in a copy of the tree of its own."""
    with tempfile.TemporaryDirectory() as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for root in _copies(jobs, Path(folder)):
            free.put(root)

        def one(mutant: Mutant) -> Outcome:
            root = free.get()
            try:
                outcome = judge(root, mutant, everything=everything)
            finally:
                free.put(root)
            print(f"{outcome.tier:9} {outcome.seconds:5.0f} s  {mutant.name}: {outcome.killer}", flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, mutants))


def table(outcomes: Sequence[Outcome], before: str = "") -> str:
    """The outcomes as a table in Markdown.

    Args:
        outcomes: What was found.
        before: A table whose rows of other mutants stay, where they still exist.
    """
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in before.splitlines() if line.startswith("| ")}
    for outcome in outcomes:
        killer = f"`{outcome.killer.partition('[')[0]}`" if outcome.killer else outcome.tier
        tier = "" if outcome.tier == "small" else f" ({outcome.tier})"
        name = outcome.mutant.name
        rows[name] = f"| {name} | `{outcome.mutant.file}` | {outcome.mutant.kind} | {killer}{tier} |"
    names = dict.fromkeys(mutant.name for mutant in (*MUTANTS, *(outcome.mutant for outcome in outcomes)))
    known = [rows[name] for name in names if name in rows]
    killed = sum(row.endswith("` |") for row in known)
    head = ["| mutant | in | kind | killed by |", "|---|---|---|---|"]
    return "\n".join([*head, *known, "", f"{killed} of {len(known)} mutants are killed by `make test`."])


def write_table(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Puts the table between the marks of a file; rows of mutants that were not judged stay.

    Raises:
        ValueError: The marks are not there.
    """
    text = path.read_text()
    begin, end = (text.find(mark) for mark in MARK)
    if not 0 <= begin < end:
        raise ValueError(f"{path} has no {MARK[0]} ... {MARK[1]}")
    path.write_text(f"{text[: begin + len(MARK[0])]}\n{table(outcomes, text[begin:end])}\n{text[end:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; exit code 1 where a mutant is not killed by the small tier."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--killers-only", action="store_true", help="do not run whole tiers against survivors")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="write the table between the marks of the file")
    given = parser.parse_args(arguments)
    known = {mutant.name: mutant for mutant in MUTANTS}
    unknown = sorted(set(given.only or ()) - known.keys())
    if unknown:
        parser.error(f"no mutants called {', '.join(unknown)}")
    chosen = [known[name] for name in given.only] if given.only else list(MUTANTS)
    outcomes = run(chosen, jobs=given.jobs, everything=not given.killers_only)
    if given.table is not None:
        write_table(given.table, outcomes)
    print(table(outcomes))
    return int(any(outcome.tier != "small" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())

"""Does dsgraph work with each supported version of torch and Python? Runs the small tier of the tests with each.

    python -m tests.versions --root FOLDER                     every pair, and the table of docs/reference/torch.md
    python -m tests.versions --root FOLDER --only 2.15         one version of torch
    python -m tests.versions --root FOLDER --select tests/ops  these tests; the table names them

For each pair a virtual environment is made in FOLDER. With CUDA's libraries it takes up to 6 GB, so it is deleted after
its tests, unless `--keep` is given. The wheel is built from this checkout and installed with its dependencies, `dsgraph
doctor` must succeed outside the checkout, and the tests then run with two workers. The machine's pip configuration is
ignored. `make test` covers the version in `.venv` itself.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "torch.md"
MARK = ("<!-- versions -->", "<!-- /versions -->")
HEAD = (
    "torch",
    "Python",
    "transformers",
    "date",
    "tests",
    "passed",
    "failed",
    "skipped",
    "minutes",
    "`dsgraph doctor`",
)

# torch -> Python: the oldest with the oldest, the newest with the newest that has wheels of both.
PAIRS: Mapping[str, str] = {"2.11": "3.10", "2.12": "3.11", "2.13": "3.11", "2.14": "3.12", "2.15": "3.13"}

# Triton 3.6, which torch 2.11 brings, interprets kernels with numpy up to 2.3.
CONSTRAINTS: Mapping[str, tuple[str, ...]] = {"2.11": ("numpy<2.4",)}

# What `make test` runs, without what measures, builds wheels, or runs documentation or other frameworks.
TIER = "not gpu and not full and not packaging"
LEFT_OUT = ("tests/benchmarks", "tests/packaging", "tests/trials", "tests/test_doc_blocks.py")
# `dsgraph emit` refuses every other version.
EMISSION_TORCH = "2.13"
EMISSION = (
    *(f"tests/tools/emission/test_{name}.py" for name in ("emission", "flex_attention", "harness")),
    "tests/tools/cli/programs/test_emit.py",
    "tests/contracts/test_inductor_order.py",
)
WHOLE = "small tier"


@dataclass(frozen=True)
class Counts:
    """Results of one run of the tests.

    Attributes:
        passed: Number of tests that passed.
        failed: Names of those that failed or could not run.
        skipped: Number of tests that were skipped.
    """

    passed: int
    failed: tuple[str, ...]
    skipped: int


def read_junit(path: Path) -> Counts:
    """Return the counts of a JUnit file that pytest has written."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = tuple(dict.fromkeys(f"{case.get('classname')}::{case.get('name')}" for case in failed))
    return Counts(len(cases) - len(failed) - len(skipped), names, len(skipped))


def merge_rows(page: str, rows: Sequence[Sequence[str]]) -> str:
    """Return the page with `rows` in its table; a row of the same torch, Python and tests is replaced.

    Raises:
        ValueError: The page has no marks.
    """
    start, end = (page.index(mark) for mark in MARK)
    body = page[start + len(MARK[0]) : end]
    old = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.strip().splitlines()[2:]]
    merged = {_key(row): row for row in [*old, *rows]}
    ordered = sorted(merged.values(), key=_version, reverse=True)
    table = tabulate(ordered, HEAD, tablefmt="github", disable_numparse=True)
    return f"{page[: start + len(MARK[0])]}\n{table}\n{page[end:]}"


def _version(row: Sequence[str]) -> tuple[int, ...]:
    return tuple(map(int, row[0].partition("+")[0].split(".")))


def _key(row: Sequence[str]) -> tuple[tuple[int, ...], str, str]:
    return _version(row)[:2], row[1].rpartition(".")[0], row[HEAD.index("tests")]


class Environment:
    """A virtual environment with one version of torch.

    Args:
        folder: Where it is made, unless it exists.
        python: The interpreter it is made with.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.python = folder, folder / "bin" / "python"
        if not self.python.exists():
            self._run(python, "-m", "venv", str(folder))

    def install(self, *requirements: str) -> None:
        """Install packages by pip, without this machine's constraints."""
        self._run(str(self.python), "-m", "pip", "install", "--quiet", *requirements)

    def version(self, package: str) -> str:
        """Return the installed version of a package; empty if it is not installed."""
        program = f"from importlib.metadata import version; print(version({package!r}))"
        done = subprocess.run([self.python, "-c", program], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def doctor(self) -> bool:
        """Return True if `dsgraph doctor` succeeds outside the checkout."""
        command = [self.folder / "bin" / "dsgraph", "doctor"]
        done = subprocess.run(command, cwd=self.folder, env=_environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout, done.stderr, sep="\n")
        return done.returncode == 0

    def test(self, *arguments: str) -> Counts:
        """Run pytest in this checkout and return the counts."""
        report = self.folder / "junit.xml"
        report.unlink(missing_ok=True)
        command = [self.python, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", f"--junitxml={report}"]
        environment = {**_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False)
        return read_junit(report) if report.exists() else Counts(0, ("pytest did not start",), 0)

    def _run(self, *command: str) -> None:
        subprocess.run(command, env={**_environment(), "PIP_CONFIG_FILE": os.devnull}, check=True)


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def _runs(python: str) -> bool:
    if shutil.which(python) is None:
        return False
    return (
        subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0
    )  # not pyenv's shim alone


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, env=_environment(), check=True)
    (wheel,) = folder.glob("dsgraph-*.whl")
    return wheel


def check(torch: str, python: str, *, root: Path, wheel: Path, select: Sequence[str]) -> tuple[list[str], Counts]:
    """Install the wheel and one version of torch, run `dsgraph doctor` and the tests; return a row of the table."""
    environment = Environment(root / f"torch-{torch}-python-{python}", f"python{python}")
    environment.install(f"torch=={torch}.*")
    environment.install(f"{wheel}[test]", f"torch=={environment.version('torch')}", *CONSTRAINTS.get(torch, ()))
    works = environment.doctor()
    begin = time.monotonic()
    left_out = LEFT_OUT if torch == EMISSION_TORCH else (*LEFT_OUT, *EMISSION)
    paths = select or ["tests", *(f"--ignore={path}" for path in left_out)]
    counts = environment.test("-m", TIER, *paths)
    minutes = (time.monotonic() - begin) / 60
    program = "import platform; print(platform.python_version())"
    exact = subprocess.run(
        [environment.python, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()
    row = [environment.version("torch"), exact, environment.version("transformers"), f"{datetime.date.today()}"]
    row += [", ".join(select) or WHOLE, str(counts.passed), str(len(counts.failed)), str(counts.skipped)]
    return [*row, f"{minutes:.0f}", "works" if works else "fails"], counts


def main() -> int:
    """Check the pairs, print the rows and write them into the page; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder of the virtual environments")
    parser.add_argument("--only", action="append", choices=PAIRS, help="a version of torch")
    parser.add_argument("--python", help="another version of Python than the pair's, such as 3.12")
    parser.add_argument(
        "--select", nargs="+", default=[], metavar="PATH", help="tests to run instead of the small tier"
    )
    parser.add_argument("--keep", action="store_true", help="keep the virtual environments")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    wheel, worst = build_wheel(root), 0
    for torch in arguments.only or PAIRS:
        python = arguments.python or PAIRS[torch]
        if not _runs(f"python{python}"):
            print(f"torch {torch}: not checked, because python{python} was not found")
            worst = 1
            continue
        row, counts = check(torch, python, root=root, wheel=wheel, select=arguments.select)
        PAGE.write_text(merge_rows(PAGE.read_text(), [row]))
        print("\n".join([" | ".join(row), *(f"failed: {name}" for name in counts.failed)]), flush=True)
        worst = max(worst, int(bool(counts.failed) or row[-1] != "works"))
        if not arguments.keep:
            shutil.rmtree(root / f"torch-{torch}-python-{python}")
    return worst


if __name__ == "__main__":
    sys.exit(main())

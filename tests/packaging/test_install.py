"""`pip install .` and a built wheel, in an environment without anything of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parent.parent.parent

CHECK = """
import pathlib, sys
import dsgraph.passes, dsgraph.inductor_ext, dsgraph
import torch
where = pathlib.Path(dsgraph.passes.__file__)
assert where.is_relative_to(sys.prefix), where
assert (pathlib.Path(dsgraph.__file__).parent / "py.typed").is_file()
for name in ("passes", "inductor_ext", "tests", "examples", "benchmarks"):
    assert not (pathlib.Path(dsgraph.__file__).parent.parent / name).exists(), f"{name} leaked into site-packages"
assert len(dsgraph.default_pipeline()) > 0
model = torch.compile(torch.nn.Linear(2, 2), backend="dsgraph", options={"codegen": "eager"})
assert model(torch.ones(1, 2)).shape == (1, 2)
print("works")
"""


def _run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environment(folder: Path) -> Path:
    """A virtual environment without dsgraph that finds this one's torch, and nothing that is installed as editable."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    packages = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A clone of what git tracks, so that nothing left over in the working tree helps."""
    folder = tmp_path_factory.mktemp("clone") / "dsgraph"
    if (ROOT / ".git").exists():
        files = _run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
        archive = folder.parent / "files.tar"
        names = folder.parent / "names"
        names.write_text(files)
        _run("tar", "--create", f"--file={archive}", "--null", f"--files-from={names}", cwd=ROOT)
        folder.mkdir()
        _run("tar", "--extract", f"--file={archive}", cwd=folder)
    return folder


@pytest.mark.full  # makes a virtual environment
def test_a_built_wheel_is_pure_python_installs_and_finds_what_it_needs(checkout, tmp_path):
    """With the present torch; `python -m tests.versions` does the same with the dependencies of each version."""
    python = _environment(tmp_path / "env")
    _run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, checkout, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    assert _run(python, "-c", CHECK, cwd=tmp_path).strip() == "works"
    assert "dsgraph works here" in _run(python.parent / "dsgraph", "doctor", cwd=tmp_path)


@pytest.mark.full
def test_a_wheel_built_from_the_source_distribution_installs(checkout, tmp_path):
    _run(sys.executable, "-m", "build", "--outdir", tmp_path, checkout, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    (source,) = tmp_path.glob("*.tar.gz")
    assert source.is_file()
    python = _environment(tmp_path / "env")
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    assert _run(python, "-c", CHECK, cwd=tmp_path).strip() == "works"

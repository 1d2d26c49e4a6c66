from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import dsgraph

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


def test_every_name_of_the_table_is_an_attribute():
    assert {"partition", "report", "nn", "KernelSpec", "default_pipeline"} < set(dsgraph.__all__)
    for name in dsgraph.__all__:
        value = getattr(dsgraph, name)
        module = f"dsgraph.{name}" if inspect.ismodule(value) else value.__module__
        assert module.startswith("dsgraph."), name
    assert all(name in dir(dsgraph) for name in dsgraph.__all__)


@pytest.mark.full  # starts a program a name
def test_names_are_found_whatever_is_imported_first():
    for program in (
        "import dsgraph; assert 'torch' not in __import__('sys').modules; dsgraph.partition; dsgraph.report",
        "import dsgraph, torch; torch.compile(torch.nn.Linear(1, 1), backend='dsgraph', options={'codegen': 'eager'})"
        "(torch.ones(1, 1))",
        "from dsgraph import Pipeline, backend; assert callable(backend)",
        "import dsgraph\ntry: dsgraph.nothing\nexcept AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise SystemExit(1)",
    ):
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dsgraph
import dsgraph.api

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


def test_the_package_offers_what_the_api_holds():
    assert dsgraph.__all__ == dsgraph.api.__all__
    assert all(getattr(dsgraph, name) is getattr(dsgraph.api, name) for name in dsgraph.__all__)


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

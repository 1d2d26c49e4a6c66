"""One dump for all tests of commands: the small GPT as two ranks see it, and what prints it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsgraph.tools.cli.main import main
from tests.pipelines import without_buckets
from tests.tools.dumping.dumps import dump


@dataclass(frozen=True)
class Printed:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="session")
def gpt_dump(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpt")
    for rank in range(2):
        dump(folder, rank=rank)
    return folder


@pytest.fixture(scope="session")
def apart_dump(tmp_path_factory) -> Path:
    """The same without buckets: the collectives of so small a model would share one."""
    folder = tmp_path_factory.mktemp("apart")
    dump(folder, pipeline=without_buckets())
    return folder


@pytest.fixture
def call(capsys) -> Callable[..., Printed]:
    """Runs `dsgraph ARGUMENTS` in this process."""

    def run(*arguments: object) -> Printed:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Printed(code, captured.out, captured.err)

    return run

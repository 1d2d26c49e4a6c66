"""The counter of allocations, built once for the tests of a module and loaded once in each rank."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks.memory import AllocationCounter, build_counter


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    """The path of the counter's library."""
    found = build_counter(tmp_path_factory.mktemp("counter"))
    if found is None:
        pytest.skip("no C++ compiler")
    return str(found)


@cache
def counter_of(library: str) -> AllocationCounter:
    """Return this rank's counter."""
    return AllocationCounter(Path(library))

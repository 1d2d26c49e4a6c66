"""Fixtures of all tests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.covering import mark_members
from tests.distributed.ranks import Processes, Ranks

pytest_plugins = ["tests.families", "tests.distributed.allocations"]


@pytest.hookimpl(tryfirst=True)  # before the choice by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves a covering array of each large product to the small tier; the longest tests come first."""
    mark_members(items)
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("distributed")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Spares the garbage collector the walk over torch and the tests, which took a fifth of the time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Gives it all back: nanobind tells at the end what is never freed."""
    gc.unfreeze()


# Tests share two cores: an example may wait for the others.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


@pytest.fixture(scope="session", autouse=True)
def _no_calibration(tmp_path_factory) -> Iterator[None]:
    """Whatever was measured on this machine: tests, and what they start, see an empty cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n)`: n gloo ranks that live as long as the test session."""
    processes = Processes()
    yield lambda world: Ranks(world, processes)
    processes.stop()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


@pytest.fixture
def fake_ranks() -> Iterator[int]:
    """A process group of eight ranks of which this is the first and the others do not exist: for looking at graphs."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    torch._dynamo.reset()
    yield 8
    dist.destroy_process_group()

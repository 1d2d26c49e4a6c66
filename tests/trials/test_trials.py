"""Each trial ends as tests/trials/README.md says: as in one process, or with a clear error; never in a hang."""

from __future__ import annotations

import importlib.util
import multiprocessing.process
from pathlib import Path

import pytest

from tests.trials.rooms import TRIALS
from tests.trials.table import table_of
from tests.trials.trial import run

PAGE = Path(__file__).with_name("README.md")


def _try(name: str) -> list[str]:
    """On a rank, which knows the trials of all rooms by this module alone."""
    # Loaders start workers, which processes of a pool may not.
    multiprocessing.process._current_process._config["daemon"] = False  # type: ignore[attr-defined]
    return run(name)


# For `make test-all` alone: each script runs in several ways, and compiles in half of them.
@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", TRIALS)
def test_it_ends_as_the_table_says(ranks, name):
    for package in TRIALS[name].needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make test-all` installs it")
    wrong = ranks(2).run(_try, name, timeout_s=30)
    assert not any(wrong), "\n".join(text for rank in wrong for text in rank)


def test_the_table_lists_all_trials():
    assert table_of(TRIALS.values()) in PAGE.read_text(), "python -m tests.trials.table tests/trials/README.md"
    assert len(TRIALS) >= 40

"""Training for long neither fills memory nor leaves handles or threads."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

import dsgraph
from tests.models import build

from .training import CASE, batches, config

pytestmark = [pytest.mark.distributed, pytest.mark.full]  # 10,000 steps

STEPS, WARM_UP = 10_000, 2_000


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _handles() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def _soak() -> tuple[float, tuple[int, int], tuple[int, int]]:
    engine = dsgraph.initialize(model=build(CASE), config=config(3, gradient_accumulation_steps=2))[0]
    batch = next(batches(0))
    before = held = 0
    handles = (0, 0)
    for step in range(STEPS):
        engine.train_batch(iter([batch, batch]))
        if step + 1 == WARM_UP:
            gc.collect()
            before, handles = _resident(), _handles()
    gc.collect()
    held = _resident()
    return (held - before) / (STEPS - WARM_UP), handles, _handles()


@pytest.mark.timeout(1500)
def test_ten_thousand_steps_leave_memory_and_handles_as_they_were(ranks):
    for slope, before, after in ranks(2).run(_soak, limit_s=1400):
        assert slope < 1024, "bytes a step"
        assert after <= before, "open files, threads"

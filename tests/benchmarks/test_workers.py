"""Groups of processes, and the counter of bytes, which needs a process of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.memory import AllocationCounter, build_counter
from benchmarks.workers import WorkerError, Workers

pytestmark = pytest.mark.distributed

MIB = 2**20  # bytes


class Session:
    def __init__(self, word: str) -> None:
        self.word = word

    def greet(self, whom: str) -> str:
        assert torch.get_num_threads() == 1
        return f"{self.word} {whom} {dist.get_rank()} {os.environ['FLAG']}"

    def raise_on(self, rank: int) -> None:
        if dist.get_rank() == rank:
            raise ValueError("something is wrong here")

    def die_on(self, rank: int) -> None:
        if dist.get_rank() == rank:
            print("my last words", flush=True)
            os._exit(3)

    def cache(self) -> str:
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]


class Counted:
    def __init__(self, library: Path) -> None:
        self.counter = AllocationCounter(library)
        self.kept: list[torch.Tensor] = []

    def measure(self) -> dict[str, int]:
        counter = self.counter
        start = counter.live
        self.kept.append(torch.empty(100 * MIB, dtype=torch.uint8))
        found = {"kept": counter.live - start}
        counter.reset_peak()
        for _ in range(3):
            torch.empty(50 * MIB, dtype=torch.uint8)
        found["transient peak"] = counter.peak - start
        found["after"] = counter.live - start
        counter.reset_peak()
        found["peak once reset"] = counter.peak - start
        self.kept.clear()
        found["freed"] = counter.live - start
        return found

    def gather(self) -> list[int]:
        """Live bytes after each of some collectives, whose buffers gloo's own threads may free."""
        shard = torch.zeros(MIB)
        live = []
        for _ in range(4):
            full = torch.empty(dist.get_world_size() * MIB)
            work = dist.all_gather_into_tensor(full, shard, async_op=True)
            work.wait()
            del full, work
            dist.barrier()
            time.sleep(0.1)  # a thread of gloo's may hold the tensors a moment longer
            live.append(self.counter.live)
        return live


def test_workers_answer_by_rank():
    with Workers("greeters", Session, "hello", world=2, environ={"FLAG": "up"}) as workers:
        assert workers.call("greet", "rank") == ["hello rank 0 up", "hello rank 1 up"]
        folders = workers.call("cache")
        assert folders[0] == folders[1] and "FLAG" not in os.environ
    assert not Path(folders[0]).exists()


def test_an_error_names_the_group_and_holds_the_traceback():
    workers = Workers("culprit", Session, "", world=2, environ={"FLAG": ""})
    with pytest.raises(
        WorkerError, match=r"(?s)culprit: 1 of 2 ranks failed.*rank 1: .*in raise_on.*something is wrong"
    ):
        workers.call("raise_on", 1)


@pytest.mark.full  # starts workers of its own
def test_a_death_is_reported_with_the_last_lines():
    workers = Workers("victim", Session, "", world=2, environ={"FLAG": ""})
    with pytest.raises(WorkerError, match=r"(?s)victim: .*rank 0: died with exit code 3.*my last words"):
        workers.call("die_on", 0)


@pytest.mark.full  # starts workers of its own
@pytest.mark.inductor
def test_counter_is_exact(tmp_path):
    library = build_counter(tmp_path)
    if library is None:
        pytest.skip("no C++ compiler")
    with Workers("counted", Counted, library, world=2) as workers:
        for found in workers.call("measure"):
            assert found == {
                "kept": 100 * MIB,
                "transient peak": 150 * MIB,
                "after": 100 * MIB,
                "peak once reset": 100 * MIB,
                "freed": 0,
            }
        for live in workers.call("gather"):
            assert live == live[:1] * 4

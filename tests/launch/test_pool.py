from __future__ import annotations

import os
import time

import pytest

from dsgraph.launch.pool import Pool

LIMITS = {"limit": 60, "grace": 2}


class Adder:
    def __init__(self, number: int, base: int) -> None:
        if base < 0:
            raise ValueError("no base")
        self.number, self.base = number, base

    def add(self, value: int) -> tuple[int, str]:
        return self.base + self.number + value, os.environ.get("FLAG", "")

    def fail(self, number: int) -> None:
        if self.number == number:
            raise ValueError("something is wrong here")

    def die(self, number: int) -> None:
        if self.number == number:
            print("my last words", flush=True)
            os._exit(3)
        time.sleep(600)


@pytest.fixture
def pool(tmp_path):
    made = Pool(Adder, 10, method="spawn", environ={"FLAG": "up"}, logs=tmp_path)
    yield made
    made.stop()


def test_processes_answer_by_number_and_stay(pool):
    assert pool.start(2, **LIMITS).are_complete
    assert pool.call("add", 5, count=2, **LIMITS).values == {0: (15, "up"), 1: (16, "up")}
    assert pool.start(3, **LIMITS).values == {0: None}, "one more"
    assert pool.call("add", 0, count=3, **LIMITS).values[2] == (12, "up")
    assert pool.call("add", 0, count=1, **LIMITS).values == {0: (10, "up")}
    assert "FLAG" not in os.environ


def test_a_failure_is_told_with_its_traceback_and_the_process_goes_on(pool):
    pool.start(2, **LIMITS)
    answers = pool.call("fail", 1, count=2, **LIMITS)
    assert not answers.are_complete and list(answers.values) == [0]
    assert "in fail" in answers.errors[1] and "something is wrong here" in answers.errors[1]
    assert pool.call("add", 0, count=2, **LIMITS).are_complete


def test_a_death_is_noticed_and_the_others_get_a_moment(pool):
    pool.start(2, **LIMITS)
    started = time.monotonic()
    answers = pool.call("die", 1, count=2, **LIMITS)
    assert (answers.dead, answers.silent) == ([1], [0])
    assert time.monotonic() - started < 30
    assert "exit code 3" in pool.last_words(1, patience=5) and "my last words" in pool.last_words(1, patience=5)
    assert pool.start(2, **LIMITS).are_complete, "all start anew"


def test_what_cannot_be_made_is_told():
    pool = Pool(Adder, -1, method="spawn")
    try:
        assert "no base" in pool.start(1, **LIMITS).errors[0]
    finally:
        pool.stop()


def test_nothing_is_left_behind(pool):
    pool.start(2, **LIMITS)
    processes = list(pool._processes)
    pool.stop(patience=10)
    assert [process.exitcode for process in processes] == [0, 0]

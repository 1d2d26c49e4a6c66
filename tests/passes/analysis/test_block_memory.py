from __future__ import annotations

import pytest

from dsgraph.passes.analysis.block_memory import BlockMemory, PlanMemory

A, B, C = (BlockMemory(name, copies, 10 * copies, 0) for name, copies in (("a", 1), ("b", 100), ("c", 10_000)))
# What is around the blocks, and a block of two graphs.
GRAPHS = [None, A, B, B, None, C, None]


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (True, [0, 1 + 100, 100 + 10_000, 100 + 10_000, 10_000, 10_000, 10_000]),
        (False, [0, 1, 100, 100, 0, 10_000, 10_000]),
    ],
)
def test_the_next_block_is_there_in_the_forward_and_the_last_one_stays(ahead, expected):
    plan = PlanMemory(GRAPHS, gathers_ahead=ahead)
    assert [plan.forward(number) for number in range(len(GRAPHS))] == expected


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (True, [10, 1 + 1_000, 101 + 100_000, 101 + 100_000, 100 + 100_000, 10_100, 10_000]),
        (False, [0, 1, 100, 100, 0, 10_000, 10_000]),
    ],
)
def test_the_backward_has_the_block_before_and_the_gradients_of_the_block_after(ahead, expected):
    plan = PlanMemory(GRAPHS, gathers_ahead=ahead)
    assert [plan.backward(number) for number in range(len(GRAPHS))] == expected


def test_without_blocks_it_holds_nothing():
    plan = PlanMemory([None, None])
    assert [plan.forward(0), plan.forward(1), plan.backward(0), plan.backward(1)] == [0, 0, 0, 0]

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsgraph.passes.analysis.knapsack import by_density, by_parts, most_valuable

_ITEMS = st.lists(st.tuples(st.integers(1, 5000), st.floats(0.001, 10.0)), min_size=1, max_size=8)


@given(_ITEMS, st.integers(0, 20000))
def test_the_choice_fits_and_is_worth_nearly_the_most(items, room):
    sizes, values = zip(*items, strict=True)
    chosen = most_valuable(sizes, values, room=room)
    assert sum(sizes[number] for number in chosen) <= room
    # Sizes are rounded up to thousandths of the room: the best set of a room that is smaller by that is no better.
    less = room - len(items) * (-(-room // 1000))
    best = max(
        sum(values[number] for number in subset)
        for count in range(len(items) + 1)
        for subset in itertools.combinations(range(len(items)), count)
        if sum(sizes[number] for number in subset) <= max(0, less)
    )
    assert sum(values[number] for number in chosen) >= best - 1e-9
    left = room - sum(sizes[number] for number in chosen)
    assert all(sizes[number] > left for number in range(len(items)) if number not in chosen)


def _items(count: int, seed: int) -> tuple[list[int], list[float]]:
    """Parameters as a model has them: many small ones, some large; seconds of a latency and of what travels."""
    draw = random.Random(seed)
    sizes = [2 ** draw.randint(8, 24) + draw.randint(0, 4096) for _ in range(count)]
    return sizes, [1e-5 + size / 10 ** draw.uniform(9, 11) for size in sizes]


def _worth(values: list[float], chosen: list[int]) -> float:
    return sum(values[number] for number in chosen)


@pytest.mark.parametrize(("count", "share"), [(100, 0.5), (200, 0.1), (300, 0.9), (400, 0.3), (700, 0.02), (700, 0.6)])
def test_of_many_items_it_is_never_worse_than_either_way(count, share):
    for seed in range(2):
        sizes, values = _items(count, seed)
        room = int(share * sum(sizes))
        chosen = most_valuable(sizes, values, room=room)
        assert sum(sizes[number] for number in chosen) <= room
        ways = [_worth(values, way(sizes, values, room=room)) for way in (by_parts, by_density)]
        assert _worth(values, chosen) >= max(ways) * (1 - 1e-12)


def test_of_many_items_density_is_better_and_taken():
    sizes, values = _items(700, 0)
    room = sum(sizes) // 50
    assert _worth(values, by_density(sizes, values, room=room)) > 1.05 * _worth(
        values, by_parts(sizes, values, room=room)
    )
    assert most_valuable(sizes, values, room=room) == by_density(sizes, values, room=room)


def test_of_few_large_items_parts_are_better_and_taken():
    sizes, values = [51, 50, 50], [52.0, 50.0, 50.0]
    assert most_valuable(sizes, values, room=100) == by_parts(sizes, values, room=100) == [1, 2]
    assert by_density(sizes, values, room=100) == [0]


def test_of_sets_of_equal_worth_it_is_always_the_same():
    assert most_valuable([4, 4, 4], [1.0, 1.0, 1.0], room=8) == [0, 1]
    assert most_valuable([], [], room=8) == []
    assert most_valuable([4], [1.0], room=0) == []

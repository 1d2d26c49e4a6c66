from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dsgraph.passes.analysis.knapsack import most_valuable

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

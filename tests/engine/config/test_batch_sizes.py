from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsgraph.engine.config.batch_sizes import BatchSizes
from dsgraph.utils.errors import ConfigError

COUNTS = st.integers(1, 64)


@given(COUNTS, COUNTS, COUNTS)
def test_two_of_three_give_the_third(micro, micro_batches, ranks):
    expected = BatchSizes(micro * micro_batches * ranks, micro, micro_batches)
    step = expected.step
    assert BatchSizes.solve(step, micro, None, ranks=ranks) == expected
    assert BatchSizes.solve(step, None, micro_batches, ranks=ranks) == expected
    assert BatchSizes.solve(None, micro, micro_batches, ranks=ranks) == expected
    assert BatchSizes.solve(step, micro, micro_batches, ranks=ranks) == expected


def test_one_is_enough():
    assert BatchSizes.solve(8, None, None, ranks=2) == BatchSizes(8, 4, 1)
    assert BatchSizes.solve(None, 4, None, ranks=2) == BatchSizes(8, 4, 1)


@pytest.mark.parametrize("given_sizes", [(8, 3, 1), (8, 3, None), (9, None, None), (8, None, 3), (2, 4, None)])
def test_a_contradiction_says_which_numbers(given_sizes):
    with pytest.raises(ConfigError, match=rf"train_batch_size {given_sizes[0]} is not .* x 2 ranks = "):
        BatchSizes.solve(*given_sizes, ranks=2)


def test_without_any_there_is_none():
    with pytest.raises(ConfigError, match="no batch size"):
        BatchSizes.solve(None, None, 4, ranks=2)

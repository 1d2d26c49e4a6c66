from __future__ import annotations

import numpy as np
import pytest
import torch

from dsgraph.utils.byte_counts import MEMORY_SHARE, default_limit, read_bytes


@pytest.mark.parametrize(
    ("given", "read"),
    [(np.int64(1000), 1000), (np.uint8(7), 7), (np.float32(0.5), 0.5), (1.0, 1.0), ("1.5 KB", 1500), (None, None)],
)
def test_integers_are_bytes_and_other_numbers_are_shares(given, read):
    found = read_bytes(given)
    assert found == read and type(found) is type(read)


@pytest.mark.parametrize(
    "given",
    [float("nan"), np.float64("nan"), float("inf"), 0, np.int64(0), -1, 1.5, np.float64(2.0), True, np.True_, "", "5"]
    + ["0 GB", [1], np.array(5), torch.tensor(5), b"1KB"],
)
def test_what_is_neither_is_refused(given):
    with pytest.raises(ValueError, match=r"it takes a number of bytes .* or a share of the device"):
        read_bytes(given)


_GIB = 2**30


@pytest.mark.parametrize(
    ("total", "free", "own"),
    [(80, 79, 0), (80, 40, 2), (80, 3, 60), (80, 0.25, 10), (16, 15, 0), (80, 79, 0.1)],
)
def test_the_default_limit_is_never_above_what_the_process_can_have(total, free, own):
    limit = default_limit(total * _GIB, int(free * _GIB), int(own * _GIB))
    assert limit <= MEMORY_SHARE * total * _GIB
    assert limit <= max(own, free + own - 1) * _GIB  # a GiB is left to contexts and libraries
    assert min(MEMORY_SHARE * total, max(own, free + own - 1)) * _GIB - limit < _GIB / 4

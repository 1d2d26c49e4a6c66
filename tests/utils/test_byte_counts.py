from __future__ import annotations

import numpy as np
import pytest
import torch

from dsgraph.utils.byte_counts import read_bytes


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

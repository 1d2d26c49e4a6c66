from __future__ import annotations

from dataclasses import replace

import pytest

from dsgraph.parallel.planning.gpus import gpu_of
from dsgraph.parallel.planning.layout import RankLayout, TrainingSetup, read_count, usual_heads
from dsgraph.utils.errors import LayoutError
from tests.parallel.layouts import SMALL, SMALL_OF_16_HEADS, planned


@pytest.mark.parametrize(
    ("text", "value"),
    [("1T", 10**12), ("175b", 175 * 10**9), ("1.5B", 1_500_000_000), ("2_048", 2048), ("7e9", 7 * 10**9), ("2K", 2000)],
)
def test_counts(text, value):
    assert read_count(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1TB", "many", "1 T", "nan", "0.0001K"])
def test_what_is_no_count(text):
    with pytest.raises(LayoutError, match=r"it takes a whole number above 0, such as 1T"):
        read_count(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 0}, "layers is 0; it takes a whole number above 0"),
        ({"heads": 24}, "24 do not divide hidden 1600"),
        ({"params": 10**12}, r"params is 1e\+12, and 48 layers of 1600 .* have about 1\.55"),
    ],
)
def test_numbers_of_no_model(change, said):
    with pytest.raises(LayoutError, match=said):
        replace(SMALL, **change)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TrainingSetup(batch=0), "batch 0"),
        (lambda: TrainingSetup(batch=8, zero_stage=4), "zero_stage is 4; it takes 0, 1, 2 or 3"),
        (lambda: RankLayout(1, 0, 1), "pp is 0"),
        (lambda: usual_heads(100), "give --heads"),
        (lambda: gpu_of("a100-40"), "did you mean 'a100-40gb'"),
    ],
)
def test_numbers_of_no_training(make, said):
    with pytest.raises(LayoutError, match=said):
        make()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": 2, "pp": 1, "dp": 8, "batch": 16}, "tp 2 does not divide 25 heads"),
        ({"tp": 1, "pp": 64, "dp": 1, "batch": 16}, "pp 64 is more than 48 layers"),
        ({"tp": 1, "pp": 2, "dp": 3, "batch": 16}, "batch 16 is no multiple of 3"),
        ({"tp": 25, "pp": 1, "dp": 1, "batch": 16}, "tp 25 is more than the 8 GPUs of a node"),
        ({"tp": 5, "pp": 4, "dp": 2, "batch": 16}, "tp 5 does not divide the 8 GPUs of a node"),
    ],
)
def test_layouts_that_cannot_be(sizes, said):
    with pytest.raises(LayoutError, match=said):
        planned(SMALL, **sizes)


def test_axes_that_stay_in_a_node():
    inside = {
        sizes: [
            link.inside for link in planned(SMALL_OF_16_HEADS, tp=sizes[0], pp=sizes[1], dp=sizes[2], batch=64).links
        ]
        for sizes in ((2, 2, 2), (4, 2, 2), (8, 2, 2))
    }
    assert inside == {(2, 2, 2): [True, True, True], (4, 2, 2): [True, False, True], (8, 2, 2): [True, False, False]}

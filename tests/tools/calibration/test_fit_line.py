from __future__ import annotations

import random

import pytest

from dsgraph.tools.calibration.fit_line import fit_line
from dsgraph.tools.calibration.measure_collectives import SIZES


def _times(latency: float, rate: float) -> list[tuple[int, float]]:
    return [(size, latency + size / rate) for size in SIZES]


@pytest.mark.parametrize(("latency", "rate"), [(1e-3, 1e7), (3e-4, 1e9), (1e-5, 1e11), (0.0, 1e9)])
def test_a_line_is_found_again(latency, rate):
    fit = fit_line(_times(latency, rate))
    assert fit.latency_s == pytest.approx(latency, rel=1e-6, abs=1e-9)
    assert fit.bytes_per_s == pytest.approx(rate, rel=1e-6)
    assert fit.error < 1e-6


def test_noise_moves_neither_figure_far():
    draw = random.Random(0)
    noisy = [(size, seconds * draw.uniform(0.9, 1.1)) for size, seconds in _times(3e-4, 1e9)]
    fit = fit_line(noisy)
    assert fit.latency_s == pytest.approx(3e-4, rel=0.1)
    assert fit.bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert 0.01 < fit.error < 0.1


@pytest.mark.parametrize("disturbed", range(len(SIZES)))
def test_one_time_that_is_far_too_long_counts_for_little(disturbed):
    times = _times(3e-4, 1e9)
    size, seconds = times[disturbed]
    times[disturbed] = (size, 10 * seconds)
    fit = fit_line(times)
    assert fit.latency_s == pytest.approx(3e-4, rel=0.2)
    assert fit.bytes_per_s == pytest.approx(1e9, rel=0.3)


def test_a_start_below_nothing_becomes_none():
    times = [(size, size / 1e9 * (1 + size / SIZES[-1])) for size in SIZES]  # ever slower
    fit = fit_line(times)
    assert fit.latency_s == 0.0
    assert 5e8 < fit.bytes_per_s < 1e9


def test_times_that_do_not_grow_leave_the_largest_size_as_cheap_as_it_was():
    fit = fit_line([(size, 1e-3 * (1 - 1e-9 * size)) for size in SIZES])
    assert fit.latency_s == pytest.approx(1e-3, rel=0.05)
    assert fit.latency_s + SIZES[-1] / fit.bytes_per_s == pytest.approx(1e-3, rel=0.1)


def test_one_size_is_no_line():
    with pytest.raises(ValueError, match="two sizes"):
        fit_line([(512, 1e-3), (512, 2e-3)])

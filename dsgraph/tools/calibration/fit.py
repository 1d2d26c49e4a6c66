"""The alpha-beta model behind measured times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# What a transfer is taken to add at the largest size, as a share of the latency, where nothing can be seen.
_LEAST_SLOPE = 0.01


@dataclass(frozen=True)
class Fit:
    """Sending n bytes takes `latency_s + n / bytes_per_s`.

    Attributes:
        latency_s: Seconds, 0 or more.
        bytes_per_s: More than 0.
        error: By how much the times are off: the median, as a share of them.
    """

    latency_s: float
    bytes_per_s: float
    error: float


def fit_line(samples: Sequence[tuple[int, float]]) -> Fit:
    """The line through (bytes, seconds) with the least squares of the relative errors.

    Relative, because sizes and times span orders of magnitude: by the absolute errors the largest sizes would decide
    alone, and the latency would be anything. It also makes a time that something has disturbed count for little: such
    times are too long, and the longer, the less they weigh. Neither figure comes out below 0.

    Args:
        samples: Of two or more sizes; bytes and seconds above 0.

    Raises:
        ValueError: There are fewer sizes.
    """
    if len({size for size, _ in samples}) < 2:
        raise ValueError(f"a line needs times of two sizes, found {len(samples)} samples: {list(samples)}")
    # Minimises the sum of (latency * x + slope * y - 1)^2 with x = 1 / seconds and y = bytes / seconds.
    xs = [1 / seconds for _, seconds in samples]
    ys = [size / seconds for size, seconds in samples]
    xx, xy, yy = (_product(a, b) for a, b in ((xs, xs), (xs, ys), (ys, ys)))
    x, y = sum(xs), sum(ys)
    determinant = xx * yy - xy * xy
    latency, slope = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    if latency < 0:
        latency, slope = 0.0, y / yy
    largest = max(size for size, _ in samples)
    if slope < _LEAST_SLOPE * latency / largest:
        latency = x / xx
        slope = _LEAST_SLOPE * latency / largest
    errors = [abs(latency + size * slope - seconds) / seconds for size, seconds in samples]
    return Fit(latency, 1 / slope, statistics.median(errors))


def _product(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(first * second for first, second in zip(a, b, strict=True))

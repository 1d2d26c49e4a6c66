"""The alpha-beta model of transfer times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# If no time per byte can be measured: the assumed time of a transfer of the largest size, as a share of the latency.
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
    """Return the line through (bytes, seconds) with the least squares of the relative errors.

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
    sizes, seconds = np.array(samples, dtype=float).T
    # Minimises the sum of (latency * x + slope * y - 1)^2.
    x, y = 1 / seconds, sizes / seconds
    latency, slope = np.linalg.lstsq(np.stack([x, y], axis=1), np.ones(len(samples)))[0]
    if latency < 0:
        latency, slope = 0.0, y.sum() / (y @ y)
    if slope < _LEAST_SLOPE * latency / sizes.max():
        latency = x.sum() / (x @ x)
        slope = _LEAST_SLOPE * latency / sizes.max()
    errors = abs(latency + sizes * slope - seconds) / seconds
    return Fit(float(latency), float(1 / slope), float(np.median(errors)))

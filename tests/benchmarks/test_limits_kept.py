from __future__ import annotations

from benchmarks.limit_cases import CASES, CONVOLUTIONS
from benchmarks.limits_kept import checks


def _row(share: float, said: str = "") -> dict[str, object]:
    return {"model": "unet", "codegen": "eager", "limit_mb": 1.0, "share": share, "said": said}


def test_the_largest_share_counts_where_the_limit_was_promised():
    eager, inductor = checks([_row(0.9), _row(0.95), _row(3.0, "cannot be promised")])
    assert eager.value == 0.95 and eager.ok
    assert inductor.value is None and not inductor.ok
    assert not checks([_row(1.01)])[0].ok


def test_twenty_families_and_two_convolution_nets():
    assert len(set(CASES) - set(CONVOLUTIONS)) >= 20 and set(CONVOLUTIONS) <= set(CASES)

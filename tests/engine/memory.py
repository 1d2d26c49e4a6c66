"""How much memory a process takes."""

from __future__ import annotations

import ctypes
from pathlib import Path


def _status(key: str) -> int:
    """Bytes that the kernel says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


class Grown:
    """How much memory the process takes inside, above what it has at the beginning."""

    def __enter__(self) -> Grown:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is to count when it is used again
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = _status("VmHWM") - self._before

"""Silencing of libraries that write to stdout and stderr directly and have no option against it."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_OURS = re.compile(rb"^(USDT|INFO|STAGE):\d{4}-\d\d-\d\d |Highs\w+::|HiGHS")
"""Patterns of lines of Kineto (torch's profiler) and HiGHS (scipy's solver)."""


@contextmanager
def without_library_output() -> Iterator[None]:
    """Drop what Kineto and HiGHS write to stdout and stderr inside the block; other lines are written at its end.

    It redirects file descriptors, so lines of other threads are delayed. If stdout or stderr is closed, nothing is
    changed.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        kept = {number: os.dup(number) for number in (1, 2)}
    except (OSError, ValueError, AttributeError):  # closed, or none at all
        yield
        return
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = {1: out, 2: err}
        try:
            for number, file in files.items():
                os.dup2(file.fileno(), number)
            yield
        finally:
            for number, own in kept.items():
                os.dup2(own, number)
                os.close(own)
            for number, file in files.items():
                file.seek(0)
                others = b"".join(line for line in file if not _OURS.search(line))
                if others:
                    os.write(number, others)
